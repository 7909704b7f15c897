"""Does recipe "auto" follow a network whose bandwidth changes during a run, without losing anything?

Four hosts train a stand-in model with SGD. Their links have 10 Gbit/s, then 50 Mbit/s, then 10 Gbit/s again. Of each
step: what exchanged it, and how long it took. At the end: whether all replicas are equal, and how far the mean of all
local models is from where the updates of all ranks should have brought it.

    python benchmarks/auto_change.py > auto-change.json

It needs Linux, for the networks.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import environment
from gradsieve.lab.network import Network
from gradsieve.lab.rank_processes import RankProcess
from gradsieve.lab.tune.stand_in import StandIn
from gradsieve.updates import UpdateSieve

RANKS = 4
NUMEL = 1_000_000
COMPUTE_SECONDS = 0.02
RATES = ("10gbit", "50mbit", "10gbit")
STEPS = 120  # with each rate
LEARNING_RATE = 0.01


def train(process: RankProcess) -> dict[str, Any]:
    torch.set_num_threads(1)
    module = StandIn(NUMEL, COMPUTE_SECONDS)
    model = DistributedDataParallel(module, init_sync=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    sieve = gradsieve.attach(model, optimizer=optimizer, check_replicas_every=20)
    assert isinstance(sieve, UpdateSieve)
    assert sieve.engine.decision is not None
    chooser = sieve.engine.decision.chooser
    gradients = Gradients(NUMEL, rank=process.rank)
    total = torch.zeros(NUMEL, dtype=torch.float64)
    steps = []
    for number in range(len(RATES) * STEPS):
        if number % STEPS == 0:
            dist.barrier()
            if process.rank == 0:
                process.report(RATES[number // STEPS])
            time.sleep(1.0)  # until the links have the new rate
        gradient = gradients.fresh()
        total += gradient.double()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(gradient).backward()
        optimizer.step()
        took = time.perf_counter() - began
        steps.append((chooser.candidates[chooser.current].name, took))
    sieve.exchange()
    return {"steps": steps, "decided": str(sieve.stats.decided), **checked(sieve, total)}


def checked(sieve: UpdateSieve, total: torch.Tensor) -> dict[str, Any]:
    """Compare replicas, and the mean of the local models with the mean of all updates."""
    shared = torch.cat([tensor.flatten() for tensor in sieve.shared_parameters().values()])
    replicas = [torch.empty_like(shared) for _ in range(RANKS)]
    dist.all_gather(replicas, shared)
    residual = torch.cat([sieve.engine.residual(name).double() for name in sieve.shared_parameters()])
    dist.all_reduce(residual)
    dist.all_reduce(total)
    numels = {name: tensor.numel() for name, tensor in sieve.shared_parameters().items()}
    parts = torch.split(shared.double() - residual / RANKS, list(numels.values()))
    found = dict(zip(numels, parts, strict=True))
    mean = torch.cat([found[name] for name in sieve.local.parameters])  # in the order of their registration
    expected = -LEARNING_RATE * total / RANKS
    return {
        "replicas_equal": all(torch.equal(shared, other) for other in replicas),
        "largest_error": float((mean - expected).abs().max()),
        "largest_parameter": float(expected.abs().max()),
    }


def stretches(steps: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Runs of steps that were exchanged alike."""
    found, start = [], 0
    for name, group in groupby(steps, key=lambda step: step[0]):
        times = sorted(seconds for _, seconds in group)
        found.append(
            {"first_step": start, "steps": len(times), "exchange": name, "median_seconds": times[len(times) // 2]}
        )
        start += len(times)
    return found


def main() -> None:
    with Network(RANKS, RATES[0], name="bench") as hosts:

        def change(rate: str) -> None:
            for host in range(RANKS):
                hosts.link(host).set_rate(rate)

        results = hosts.run_rank_processes(train, on_report=change)
    first = results[0]
    json.dump(
        {
            "environment": environment(),
            "ranks": RANKS,
            "parameters": NUMEL,
            "compute_seconds": COMPUTE_SECONDS,
            "rates": {number * STEPS: rate for number, rate in enumerate(RATES)},
            "stretches": stretches(first["steps"]),
            "steps": first["steps"],
            **{key: first[key] for key in ("decided", "replicas_equal", "largest_error", "largest_parameter")},
        },
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    main()
