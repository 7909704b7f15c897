"""Accelerate: attach after prepare(), and have the accelerator save each rank's state and clip own gradients.

torchrun --nproc-per-node=2 examples/accelerate_loop.py      (accelerate launch --cpu starts one process only)
"""

import argparse
import json

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import gradsieve  # <-
from bytes_of_python import ByteModel, batch, hash_of, python_bytes
from gradsieve.integrations.accelerate import clip_with, save_with  # <-


def main(steps: int, folder: str | None, resume_at: int) -> None:
    accelerator = Accelerator(cpu=True)
    text = python_bytes()
    torch.manual_seed(0)
    model = ByteModel()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    sieve = gradsieve.attach(model, optimizer=optimizer)  # <-
    save_with(accelerator, model, sieve)  # <-
    clip_with(accelerator, sieve)  # <-
    if resume_at:
        accelerator.load_state(f"{folder}/step-{resume_at}")
    loss = torch.tensor(float("nan"))
    for step in range(resume_at, steps):
        contexts, following = batch(text, step, accelerator.process_index)
        loss = cross_entropy(model(contexts), following)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if folder is not None and (step + 1) % 20 == 0:
            accelerator.save_state(f"{folder}/step-{step + 1}")
    stats = sieve.stats
    result = {
        "rank": accelerator.process_index,
        "loss": loss.item(),
        "sieve_steps": stats.steps,
        "bytes_sent": stats.traffic.bytes_sent,
        "parameters": hash_of(model.module),
    }
    print(json.dumps(result), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="where to save a checkpoint every 20 steps")
    parser.add_argument("--resume-at", type=int, default=0, help="the step of a checkpoint there to go on from")
    options = parser.parse_args()
    main(options.steps, options.folder, options.resume_at)
