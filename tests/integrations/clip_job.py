"""One rank of a job that trains with a front end's own clipping, for `test_clipping`; started by torchrun.

Every gradient is far longer than the limit, so after each step its norm tells the limit that was applied.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import gradsieve
from support.ddp_models import parameters_digest

LIMIT = 0.5
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "updates": {},
    "gradients": {"exchange": "gradients", "recipe": "topka", "density": 0.5},
}


class Steep(nn.Module):
    """Its gradient does not depend on its parameters, and is long."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": 1000 * self.layer(x).sum()}


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.rand(8, generator=generator) + 1} for _ in range(2 * STEPS)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def steep_norm(model: nn.Module, clip: Any) -> float:
    """Of a long gradient after `clip`, outside of training."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    clip()
    return float(get_total_norm([parameter.grad for parameter in model.parameters()]))


def with_accelerate(kind: str, results: dict[str, Any]) -> nn.Module:
    from accelerate import Accelerator

    from gradsieve.integrations.accelerate import clip_with

    accelerator = Accelerator(cpu=True)
    model = Steep()
    model, optimizer = accelerator.prepare(model, sgd(model))
    settings = {"recipe": "topka", "density": 0.5} if kind == "gradients" else {"optimizer": optimizer}
    sieve = gradsieve.attach(model, **settings)
    restore = clip_with(accelerator, sieve)
    clip_with(accelerator, sieve)  # once more is harmless
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(model(data()[2 * step + accelerator.process_index]["x"])["loss"])
        accelerator.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    other = Steep()
    results["others"] = steep_norm(other, lambda: accelerator.clip_grad_norm_(other.parameters(), max_norm=LIMIT))
    restore()
    results["after"] = steep_norm(model, lambda: accelerator.clip_grad_norm_(model.parameters(), LIMIT))
    return model.module


def with_transformers(kind: str, results: dict[str, Any]) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    from gradsieve.integrations.transformers import SieveCallback

    model = Steep()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=LIMIT, use_cpu=True,
            save_strategy="no", disable_tqdm=True, report_to="none",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data(), optimizers=(sgd(model), None))
        trainer.add_callback(SieveCallback(trainer, **SETTINGS[kind]))
        trainer.train()
    results["setting"] = trainer.args.max_grad_norm
    results["after"] = steep_norm(model, lambda: trainer.accelerator.clip_grad_norm_(model.parameters(), LIMIT))
    return model


def with_lightning(kind: str, results: dict[str, Any]) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer

    from gradsieve.integrations.lightning import SieveCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Steep()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    class ByValue(Module):
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="value")

    def fitted(module: LightningModule, limit: float | None) -> Trainer:
        trainer = Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_steps=STEPS, callbacks=[SieveCallback(**SETTINGS[kind])],
            gradient_clip_val=limit, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            logger=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), batch_size=1))
        return trainer

    module = Module()
    trainer = fitted(module, LIMIT)
    optimizer = sgd(module)
    results["setting"] = trainer.gradient_clip_val
    results["after"] = steep_norm(module, lambda: trainer.precision_plugin.clip_gradients(optimizer, LIMIT))
    results["of_values"] = []

    def note_largest(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        results["of_values"].append(float(optimizer.param_groups[0]["params"][0].grad.abs().max()))

    handle = register_optimizer_step_post_hook(note_largest)
    fitted(ByValue(), None)
    handle.remove()
    return module


def main(front_end: str, kind: str) -> None:
    torch.set_num_threads(1)
    norms: list[float] = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: norms.append(float(get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]])))
    )
    results: dict[str, Any] = {}
    model = globals()[f"with_{front_end}"](kind, results)
    handle.remove()
    told = {"rank": dist.get_rank(), "parameters": parameters_digest(model), "norms": norms[:STEPS], **results}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
