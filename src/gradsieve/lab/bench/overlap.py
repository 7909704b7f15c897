"""How much of the exchange a backward pass hides, for several sizes of groups; and what the hook itself costs.

A step is a forward and a backward pass of a VGG-16, gradients exchanged. `compute_seconds` is the same without any
exchange (`no_sync`); `exchange_seconds` is the exchange of the same groups alone, from gradients that are all there.
What a step takes beyond computing is the part that shows: `hidden_share` is one minus that over the exchange alone.
On few cores both compete for the processor, so a share is small, or below zero, where the network is not what takes
the time.

The row `nothing sent` has a reducer that sends nothing: what an infinitely fast network would leave of the hook.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve.comm import Comm
from gradsieve.ddp import attach
from gradsieve.engine import Step
from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.report import Column, Report, Row, environment, milliseconds, thousands
from gradsieve.lab.bench.site import check_networks, run_on
from gradsieve.lab.machine import require_memory
from gradsieve.lab.models.vgg import Vgg16, VggShape
from gradsieve.lab.workers import Worker, threads_per_worker
from gradsieve.recipes import Recipe, recipe
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.selectors.threshold import Threshold
from gradsieve.sieve import Sieve
from gradsieve.vector import SparseVector

WARMUP_STEPS = 8  # the network decides here, not whether thresholds still move
COPIES = 6  # of the parameters, that a model with its gradients, buckets, residual and spare takes

COLUMNS = (
    Column("method", "method"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("group_mb", "group MB", lambda value: "all" if value is None else f"{value:g}"),
    Column("num_groups", "groups"),
    Column("seconds", "step", milliseconds),
    Column("compute_seconds", "compute", milliseconds),
    Column("exchange_seconds", "exchange alone", milliseconds),
    Column("hidden_share", "hidden", lambda value: f"{value:.0%}"),
    Column("overhead_share", "over compute", lambda value: f"{value:.1%}"),
)


@dataclass(frozen=True)
class OverlapPlan:
    """What to measure."""

    recipe: str
    values: str
    density: float
    group_mbs: Sequence[float]  # besides one group for all
    networks: Sequence[str]
    ranks: int
    width: int  # of the VGG-16; 64 is the paper's
    batch: int
    repeats: int

    def __post_init__(self) -> None:
        for name in ("ranks", "width", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class NothingSent(StatelessReducer):
    """Gives back what it gets: every rank for itself. Only for measuring what is left without a network."""

    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        """See `Reducer.reduce`."""
        return Reduced(local, SparseVector.empty(local.numel, local.values)), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """See `Reducer.cost`."""
        return Cost(0, 0, 0)


class Measured(NamedTuple):
    """One contender on one rank."""

    num_groups: int
    steps: list[float]
    exchanges: list[float]


class Contender:
    """A model of its own, exchanged in one way."""

    def __init__(self, plan: OverlapPlan, chosen: Recipe | None, group_mb: float | None) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Vgg16(VggShape(width=plan.width)))
        self.sieve: Sieve | None = None
        if chosen is not None:
            self.sieve = attach(self.model, chosen, density=plan.density, group_mb=group_mb)
        self._images = torch.randn(plan.batch, 3, 32, 32)
        self._classes = torch.randint(10, (plan.batch,))
        self._loss = nn.CrossEntropyLoss()

    def step(self) -> float:
        """Forward and backward; the gradients are there when it ends."""
        self.model.zero_grad(set_to_none=True)
        return _timed(lambda: self._loss(self.model(self._images), self._classes).backward())

    def compute(self) -> float:
        """The same on this rank alone."""
        with self.model.no_sync():
            return self.step()

    def exchange(self) -> float:
        """The groups one after the other, from a rank's own gradients that are all there."""
        assert self.sieve is not None
        assert self.sieve.worker is not None
        engine, worker = self.sieve.engine, self.sieve.worker
        self.compute()
        grads = {
            name: parameter.grad.flatten().clone()
            for name, parameter in self.model.module.named_parameters()
            if parameter.grad is not None
        }

        def exchange_all() -> None:
            step = Step(engine)
            for name, grad in grads.items():
                step.deliver(name, grad)
            for index in step.ready():
                step.exchange(index)
            step.finish()

        return _timed(lambda: worker.call(exchange_all))


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_overlap(plan: OverlapPlan, progress: Progress = silent) -> Report:
    """All networks, one after the other."""
    numel = sum(parameter.numel() for parameter in Vgg16(VggShape(width=plan.width)).parameters())
    recipe(plan.recipe, values=plan.values)
    check_networks(plan.networks, plan.ranks)
    require_memory(4 * COPIES * numel * plan.ranks * (len(plan.group_mbs) + 3), "use a smaller --width or fewer ranks")
    rows: list[Row] = []
    for network in plan.networks:
        measured = run_on(network, plan.ranks, measure, plan, network, on_report=lambda told: progress(*told))
        rows += _rows(plan, network, numel, measured)
    return Report(environment(), rows)


def measure(worker: Worker, plan: OverlapPlan, network: str) -> dict[str, Measured]:
    """One rank's part: all contenders take turns."""
    chosen = recipe(plan.recipe, values=plan.values)
    contenders = {
        "dense DDP": Contender(plan, None, None),
        "nothing sent": Contender(plan, Recipe(Threshold(), NothingSent()), None),
    }
    for group_mb in (None, *plan.group_mbs):
        contenders[_name(plan, group_mb)] = Contender(plan, chosen, group_mb)
    samples: dict[str, Measured] = {
        name: Measured(0 if c.sieve is None else len(c.sieve.engine.groups), [], []) for name, c in contenders.items()
    }
    samples["compute"] = Measured(0, [], [])
    steps = WARMUP_STEPS + plan.repeats
    for number in range(steps):
        taken = {"compute": (contenders["dense DDP"].compute(), 0.0)}
        for name, contender in contenders.items():
            taken[name] = contender.step(), contender.exchange() if contender.sieve else 0.0
        if number >= WARMUP_STEPS:
            for name, (step, exchange) in taken.items():
                samples[name].steps.append(step)
                samples[name].exchanges.append(exchange)
        if worker.rank == 0:
            worker.report((f"{plan.ranks} ranks, {network}", number + 1, steps))
    for contender in contenders.values():
        if contender.sieve is not None:
            contender.sieve.close()
    return samples


def _name(plan: OverlapPlan, group_mb: float | None) -> str:
    return f"{plan.recipe}, {'one group' if group_mb is None else f'{group_mb:g} MB'}"


def _rows(plan: OverlapPlan, network: str, numel: int, measured: Sequence[dict[str, Measured]]) -> list[Row]:
    compute = _median([rank["compute"].steps for rank in measured])
    groups: dict[str, float | None] = {_name(plan, group_mb): group_mb for group_mb in (None, *plan.group_mbs)}
    rows: list[Row] = []
    for name, sample in measured[0].items():
        seconds = _median([rank[name].steps for rank in measured])
        row: Row = {
            "method": name,
            "network": network,
            "numel": numel,
            "density": plan.density,
            "ranks": plan.ranks,
            "threads": threads_per_worker(plan.ranks),
            "repeats": plan.repeats,
            "batch": plan.batch,
            "seconds": seconds,
            "compute_seconds": compute,
            "overhead_share": seconds / compute - 1,
            "raw_seconds": [rank[name].steps for rank in measured],
        }
        if name in groups:
            exchange = _median([rank[name].exchanges for rank in measured])
            row |= {"group_mb": groups[name], "num_groups": sample.num_groups, "exchange_seconds": exchange}
            row["hidden_share"] = 1 - (seconds - compute) / exchange
        rows.append(row)
    return rows


def _median(steps_of_ranks: Sequence[Sequence[float]]) -> float:
    """Of the slowest rank's time in each step."""
    return float(statistics.median(max(step) for step in zip(*steps_of_ranks, strict=True)))
