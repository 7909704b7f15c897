"""Plain DDP: the lines marked with <- are all that is new.

torchrun --nproc-per-node=2 examples/ddp.py
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradsieve  # <-
from bytes_of_python import ByteModel, batch, hash_of, python_bytes


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    text = python_bytes()
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sieve = gradsieve.attach(model, optimizer=optimizer)  # <-
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        contexts, following = batch(text, step, dist.get_rank())
        loss = cross_entropy(model(contexts), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = sieve.stats
    result = {
        "rank": dist.get_rank(),
        "loss": loss.item(),
        "sieve_steps": stats.steps,
        "bytes_sent": stats.traffic.bytes_sent,
        "parameters": hash_of(model.module),
    }
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
