"""Does recipe "auto" take as long per step as the best single choice? Training steps of stand-in models, in turns.

Each network, size, computing time and kind of exchange is one case. In each round all contenders of a case train one
after the other, in an order that turns from round to round. "auto" decides from its own measurements first, as for a
user, and its steps are timed after that. The time of a step is the median, of the slowest rank.

    python benchmarks/auto.py --networks loopback,1gbit,100mbit --parameters 0.1,1,15,66 --compute 0,0.2 > auto.json

It needs Linux, for the networks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import environment
from gradsieve.lab.bench.site import run_on
from gradsieve.lab.rank_processes import RankProcess
from gradsieve.lab.tune.stand_in import StandIn

RANKS = 4
KINDS = {"updates": ("dense", "onebit", "auto"), "gradients": ("dense", "oktopk", "topka", "auto")}
DENSITY = 0.01  # of gradients
WARMUP_STEPS = 13  # of a sparse recipe: connections are made at the 13th call
DENSE_WARMUP_STEPS = 2
TIMED_SECONDS = 3.0  # at least, and
FEWEST_STEPS, MOST_STEPS = 3, 60
MOST_DECIDING_STEPS = 60


class Contender:
    """A model in training, as a user would write it."""

    def __init__(self, name: str, kind: str, numel: int, compute_seconds: float) -> None:
        self.gradients = Gradients(numel, rank=dist.get_rank())
        module = StandIn(numel, compute_seconds)
        self.model = DistributedDataParallel(module, init_sync=False)
        make = torch.optim.AdamW if kind == "updates" else torch.optim.SGD
        self.optimizer = make(module.parameters(), lr=1e-6)
        self.sieve: gradsieve.Sieve | None = None
        if name != "dense":
            which = {"optimizer": self.optimizer} if kind == "updates" else {"density": DENSITY}
            self.sieve = gradsieve.attach(self.model, name, check_replicas_every=0, **which)

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.gradients.fresh()).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    @property
    def is_deciding(self) -> bool:
        return self.sieve is not None and self.sieve.engine.decision is not None and self.sieve.stats.decided is None

    def timed(self) -> list[float]:
        """Seconds per step of the slowest rank, after the decision and a warm-up."""
        for _ in range(MOST_DECIDING_STEPS):
            if not self.is_deciding:
                break
            self.step()
        is_dense = self.sieve is None or (self.sieve.stats.decided and self.sieve.stats.decided.name == "dense")
        for _ in range(DENSE_WARMUP_STEPS if is_dense else WARMUP_STEPS):
            self.step()
        times: list[float] = []
        while len(times) < FEWEST_STEPS or (sum(times) < TIMED_SECONDS and len(times) < MOST_STEPS):
            own = torch.tensor([self.step()], dtype=torch.float64)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            times.append(own.item())
        return times

    def close(self) -> None:
        if self.sieve is not None:
            self.sieve.close()


def run_case(process: RankProcess, kind: str, numel: int, compute_seconds: float, rounds: int) -> dict[str, Any]:
    """The medians of each contender by round, and what "auto" decided."""
    torch.set_num_threads(1)
    names = KINDS[kind]
    medians: dict[str, list[float]] = {name: [] for name in names}
    decided: list[str] = []
    for number in range(rounds):
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            contender = Contender(name, kind, numel, compute_seconds)
            medians[name].append(statistics.median(contender.timed()))
            if contender.sieve is not None and contender.sieve.stats.decided is not None:
                decided.append(str(contender.sieve.stats.decided))
            contender.close()
            del contender
    return {"seconds_per_step": medians, "decided": decided}


def row(network: str, kind: str, numel: int, compute_seconds: float, rounds: int) -> dict[str, Any]:
    found = run_on(network, RANKS, run_case, kind, numel, compute_seconds, rounds)[0]
    medians = {name: statistics.median(times) for name, times in found["seconds_per_step"].items()}
    best = min(seconds for name, seconds in medians.items() if name != "auto")
    return {
        "network": network,
        "kind": kind,
        "parameters": numel,
        "compute_seconds": compute_seconds,
        **found,
        "auto_over_best": medians["auto"] / best,
        "auto_over_dense": medians["auto"] / medians["dense"],
    }


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", default="loopback,1gbit,100mbit")
    parser.add_argument("--parameters", type=numbers, default=[0.1, 1, 15, 66], help="in millions")
    parser.add_argument("--compute", type=numbers, default=[0, 0.2], help="seconds per step")
    parser.add_argument("--kinds", default="updates,gradients")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    rows = []
    for network in chosen.networks.split(","):
        for millions in chosen.parameters:
            for compute in chosen.compute:
                for kind in chosen.kinds.split(","):
                    rows.append(row(network, kind, round(millions * 1e6), compute, chosen.rounds))
                    print(json.dumps(rows[-1]), file=sys.stderr)
    json.dump({"environment": environment(), "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
