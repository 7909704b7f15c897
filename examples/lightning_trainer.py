"""Lightning: one callback is all that is new.

torchrun --nproc-per-node=2 examples/lightning_trainer.py
"""

import argparse
import json

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bytes_of_python import BATCH_SIZE, CONTEXT_BYTES, ByteModel, hash_of, python_bytes
from gradsieve.integrations.lightning import SieveCallback  # <-


class NextByte(LightningModule):
    """A model as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteModel()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of one batch."""
        contexts, following = batch
        loss = cross_entropy(self.model(contexts), following)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, as in the other examples."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(epochs: int, folder: str | None, resume_from: str | None) -> None:
    seed_everything(0, verbose=False)
    windows = python_bytes()[: 30 * 2 * BATCH_SIZE + CONTEXT_BYTES].unfold(0, CONTEXT_BYTES + 1, 1)
    data = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=BATCH_SIZE)
    callbacks = [SieveCallback()]  # <-
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = NextByte()
    trainer.fit(module, data, ckpt_path=resume_from)
    stats = callbacks[0].sieve.stats
    result = {
        "rank": trainer.global_rank,
        "loss": trainer.callback_metrics["loss"].item(),
        "sieve_steps": stats.steps,
        "bytes_sent": stats.traffic.bytes_sent,
        "parameters": hash_of(module),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", help="where to save a checkpoint after every epoch")
    parser.add_argument("--resume-from", help="a checkpoint to go on from")
    options = parser.parse_args()
    main(options.epochs, options.folder, options.resume_from)
