"""Hugging Face Trainer: one callback is all that is new. A small GPT-2 made from its configuration, no download.

torchrun --nproc-per-node=2 examples/hf_trainer.py
"""

import argparse
import json
import tempfile

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from bytes_of_python import hash_of, python_bytes
from gradsieve.integrations.transformers import SieveCallback  # <-

SEQUENCE_BYTES = 64


def main(steps: int, folder: str, resume_from: str | None) -> None:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        save_steps=20,
        logging_steps=10,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE_BYTES, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    sequences = python_bytes()[: SEQUENCE_BYTES * 1000].view(-1, SEQUENCE_BYTES)
    dataset = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)
    callback = SieveCallback(trainer)  # <-
    trainer.add_callback(callback)  # <-
    trainer.train(resume_from_checkpoint=resume_from)
    stats = callback.sieve.stats
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "rank": trainer.args.process_index,
        "loss": losses[-1],
        "sieve_steps": stats.steps,
        "bytes_sent": stats.traffic.bytes_sent,
        "parameters": hash_of(trainer.model),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="where to save a checkpoint every 20 steps; by default they are thrown away")
    parser.add_argument("--resume-from", help="a checkpoint to go on from")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        main(options.steps, options.folder or passing, options.resume_from)
