"""How much of the exchange the backward pass hides, for several group sizes, and what the hook itself costs.

A step is a forward and a backward pass of a VGG-16 with gradients exchanged. `compute_seconds` is the same without an
exchange (`no_sync`). `exchange_seconds` is the exchange of the same groups alone, with all gradients computed before.
`hidden_share` is 1 - (step - compute) / exchange. On few cores computing and exchanging compete for the processor, so
the share is small or negative unless the network is the bottleneck.

The row `nothing sent` has a reducer that sends nothing: the cost of the hook on an infinitely fast network.
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
from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.ddp import attach
from gradsieve.engine import Step
from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.report import Column, Report, Row, environment, milliseconds, thousands
from gradsieve.lab.bench.site import check_networks, run_on
from gradsieve.lab.machine import require_memory
from gradsieve.lab.models.vgg import Vgg16, VggShape
from gradsieve.lab.rank_processes import RankProcess, threads_per_rank
from gradsieve.recipes import Recipe, recipe
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.selectors.threshold import Threshold
from gradsieve.sieve import Sieve
from gradsieve.vector import SparseVector

WARMUP_STEPS = 8  # enough here: the network dominates, thresholds need not be stable
COPIES = 6  # memory of a contender in copies of the parameters: model, gradients, buckets, residual and spare

COLUMNS = (
    Column("method", "method"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("group_mb", "group size in MB", lambda value: "all" if value is None else f"{value:g}"),
    Column("num_groups", "groups"),
    Column("seconds", "step time", milliseconds),
    Column("compute_seconds", "compute only", milliseconds),
    Column("exchange_seconds", "exchange only", milliseconds),
    Column("hidden_share", "hidden", lambda value: f"{value:.0%}"),
    Column("overhead_share", "overhead", lambda value: f"{value:.1%}"),
)


@dataclass(frozen=True)
class OverlapPlan:
    """What to measure."""

    recipe: str
    values: str
    density: float
    group_mbs: Sequence[float]  # a single group is always measured too
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
    """Returns its input on every rank. Only for measuring the cost of the hook without a network."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        return Reduced(local, SparseVector.empty(local.numel, local.values)), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """See `Reducer.cost`."""
        return Cost(0, 0, 0)


class Measured(NamedTuple):
    """Seconds of one contender on one rank."""

    num_groups: int
    steps: list[float]
    exchanges: list[float]


class Contender:
    """A DDP model of its own, with one way to exchange gradients."""

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
        """Seconds of forward and backward, until all gradients are exchanged."""
        self.model.zero_grad(set_to_none=True)
        return _timed(lambda: self._loss(self.model(self._images), self._classes).backward())

    def compute(self) -> float:
        """Seconds of forward and backward without an exchange."""
        with self.model.no_sync():
            return self.step()

    def exchange(self) -> float:
        """Seconds of exchanging all groups one after the other, with all gradients computed before."""
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
    numel = sum(parameter.numel() for parameter in Vgg16(VggShape(width=plan.width)).parameters())
    recipe(plan.recipe, values=plan.values)
    check_networks(plan.networks, plan.ranks)
    require_memory(4 * COPIES * numel * plan.ranks * (len(plan.group_mbs) + 3), "use a smaller --width or fewer ranks")
    rows: list[Row] = []
    for network in plan.networks:
        measured = run_on(network, plan.ranks, measure, plan, network, on_report=lambda report: progress(*report))
        rows += _rows(plan, network, numel, measured)
    return Report(environment(), rows)


def measure(process: RankProcess, plan: OverlapPlan, network: str) -> dict[str, Measured]:
    """One rank's part: all contenders take turns. Returns the seconds by contender."""
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
        if process.rank == 0:
            process.report((f"{plan.ranks} ranks, {network}", number + 1, steps))
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
            "threads": threads_per_rank(plan.ranks),
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
    """The median over steps of the slowest rank's time."""
    return float(statistics.median(max(step) for step in zip(*steps_of_ranks, strict=True)))
