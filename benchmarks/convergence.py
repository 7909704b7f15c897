"""Does it learn as well? One small real task, several ways to exchange gradients, the same seeds: held-out scores.

    python benchmarks/convergence.py --workload lstm --steps 250 > benchmarks/results/convergence-lstm.json

Real processes, plain DDP and `gradsieve.attach`. `no feedback` drops what is not sent, to show what feedback does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.feedback import NoFeedback
from gradsieve.lab.bench.report import environment
from gradsieve.lab.workers import Worker, run_workers
from gradsieve.lab.workloads import WORKLOADS, set_rate
from gradsieve.recipes import Recipe, recipe

DENSE, NO_FEEDBACK = "dense DDP", "oktopk, no feedback"
METHODS = [DENSE, "oktopk exact", "oktopk bf16", "oktopk int8", "oktopk int4", "oktopk sign", NO_FEEDBACK]


class Course(NamedTuple):
    """One run."""

    workload: str
    method: str
    density: float
    seed: int
    steps: int


def exchange(method: str) -> Recipe | None:
    """None is DDP's own all_reduce."""
    if method == DENSE:
        return None
    if method == NO_FEEDBACK:
        return replace(recipe("oktopk"), feedback=NoFeedback())
    name, values = method.split()
    return recipe(name, values=values)


def train(worker: Worker, course: Course) -> dict[str, Any]:
    """One rank of one run: scores on held-out data, and how many bytes came in."""
    workload = WORKLOADS[course.workload]
    preset = workload.preset("default")
    task = workload.open(preset)
    model = DistributedDataParallel(task.model(seed=course.seed))
    sampler = task.sampler(rank=worker.rank, size=worker.size, seed=course.seed)
    optimizer, chosen = preset.optimizer.build(model), exchange(course.method)
    sieve = None if chosen is None else gradsieve.attach(model, chosen, density=course.density)
    carry, done, losses = None, 0, []
    while done < course.steps:
        for batch in task.batches(sampler):
            set_rate(optimizer, preset.rate(preset.epochs * done / course.steps))
            loss, carry = task.loss(model, batch, carry)
            optimizer.zero_grad()
            loss.backward()
            if preset.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), preset.clip_norm)
            optimizer.step()
            losses.append(float(loss.detach()))
            done += 1
            if done == course.steps:
                break
    sums = task.measure(model.module, worker.rank, worker.size)
    dist.all_reduce(sums)
    received = None if sieve is None else sieve.stats.traffic.bytes_received / course.steps
    if sieve is not None:
        sieve.close()
    return {"scores": task.scores(sums), "last_losses": losses[-20:], "bytes_received_per_step": received}


def row(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """All seeds of one method."""
    runs = []
    for seed in range(arguments.seeds):
        course = Course(arguments.workload, method, arguments.density, seed, arguments.steps)
        runs.append(run_workers(arguments.ranks, train, course)[0])
        print(method, seed, runs[-1]["scores"], file=sys.stderr, flush=True)
    names = list(runs[0]["scores"])
    return {
        "method": method,
        "workload": arguments.workload,
        "density": arguments.density,
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "mean": {name: statistics.mean(run["scores"][name] for run in runs) for name in names},
        "spread": {name: statistics.stdev(run["scores"][name] for run in runs) for name in names},
        "raw": runs,
    }


def main() -> None:
    """All methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="lstm", choices=sorted(WORKLOADS))
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    rows = [row(arguments, method) for method in arguments.method or METHODS]
    print(json.dumps({"environment": environment(), "results": rows}, indent=2))


if __name__ == "__main__":
    main()
