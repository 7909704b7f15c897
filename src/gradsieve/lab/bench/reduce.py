"""Time of the whole data path on rank processes: from the gradient to the mean written back over it.

Ranks communicate over loopback, or each has its own host on a network of limited links. Recipes and baselines take
turns within a repeat. Ranks start a step at the same moment, and its time is that of the slowest rank. The row
`gloo all_reduce` is the backend alone on the same tensor: `speedup_over_dense` is relative to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from gradsieve.comm import CountingComm, TorchComm, Traffic
from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.baselines.contender import BaselineContender
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS, Contender, Progress, contest, silent
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.meter import Meter, StepSample
from gradsieve.lab.bench.report import (
    BACKEND,
    Column,
    Report,
    Row,
    environment,
    megabytes,
    milliseconds,
    thousands,
    times,
)
from gradsieve.lab.bench.site import LOOPBACK, check_networks, run_on
from gradsieve.lab.machine import require_memory
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS, RankProcess, threads_per_rank
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import OWN, RECIPES, Recipe, recipe
from gradsieve.reducers.dense import Dense
from gradsieve.vector.pieces import Pieces

DENSE_WARMUP_STEPS = 2

COLUMNS = (
    Column("recipe", "recipe"),
    Column("values", "values"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("threads", "threads"),
    Column("seconds", "step time", milliseconds),
    Column("speedup_over_dense", "speedup", times),
    Column("bytes_received_per_rank", "received per rank", megabytes),
    Column("interface_bytes_received_per_rank", "at interface", megabytes),
    Column("messages_per_rank", "messages"),
    Column("calls_per_step", "calls"),
)


@dataclass(frozen=True)
class ReducePlan:
    """What to measure: every recipe and baseline under every combination of conditions."""

    recipes: Sequence[str]
    numels: Sequence[int]
    densities: Sequence[float]
    ranks: Sequence[int]
    repeats: int
    networks: Sequence[str] = (LOOPBACK,)  # or `1gbit`, `1gbit+5ms`: every rank in its own host
    baselines: Sequence[str] = ()
    values: Sequence[str] = (OWN,)  # value codes; dense has none and runs once


class Cell(NamedTuple):
    """One combination of conditions."""

    recipes: tuple[str, ...]
    baselines: tuple[str, ...]
    network: str
    numel: int
    density: float
    ranks: int
    repeats: int
    values: tuple[str, ...]

    @property
    def coded_recipes(self) -> dict[str, tuple[str, str]]:
        """Recipe and value code, by the name they have in the contest."""
        mixed = {}
        for name in self.recipes:
            own = recipe(name).reducer.codec.values
            for code in self.values if name != "dense" else (OWN,):
                mixed[name if code in (OWN, own) else f"{name} {code}"] = name, own if code == OWN else code
        return mixed


class RecipeContender(Contender[StepSample]):
    """A recipe in a pipeline, with its traffic counted."""

    def __init__(self, chosen: Recipe, grad: Tensor, k: int, meter: Meter) -> None:
        self.k = k
        self._meter = meter
        self.warmup_steps = DENSE_WARMUP_STEPS if isinstance(chosen.reducer, Dense) else RESIDUAL_WARMUP_STEPS
        self._grad = grad
        self._comm = CountingComm(TorchComm(timeout_seconds=TIMEOUT_SECONDS))
        self._pipeline = Pipeline(chosen, self._comm)
        self._state = self._pipeline.init(Pieces([grad]))

    @override
    def step(self, grad: Tensor) -> StepSample:
        self._grad.copy_(grad)
        self._comm.reset()
        return self._meter(self._run).with_traffic(self._comm.reset())

    def _run(self) -> None:
        self._state = self._pipeline.step(self._grad, self.k, self._state, self._grad)


class BackendContender(Contender[StepSample]):
    """The backend's all_reduce and a division, nothing else."""

    warmup_steps = DENSE_WARMUP_STEPS

    def __init__(self, grad: Tensor, meter: Meter) -> None:
        self._grad = grad
        self._meter = meter
        self._size = dist.get_world_size()

    @override
    def step(self, grad: Tensor) -> StepSample:
        """Traffic is that of a bandwidth-optimal all_reduce, as `CountingComm` counts it."""
        self._grad.copy_(grad)
        others = self._size - 1
        num_bytes = 2 * others * self._grad.numel() * self._grad.element_size() // self._size
        return self._meter(self._run).with_traffic(Traffic(1, 2 * others, 2 * others, num_bytes, num_bytes))

    def _run(self) -> None:
        dist.all_reduce(self._grad)
        self._grad.div_(self._size)


def bench_reduce(plan: ReducePlan, progress: Progress = silent) -> Report:
    """Measure all combinations, each with its own rank processes."""
    _check(plan)
    rows: list[Row] = []
    for network in plan.networks:
        for ranks in plan.ranks:
            for numel in plan.numels:
                for density in plan.densities:
                    names = tuple(plan.recipes), tuple(plan.baselines)
                    cell = Cell(*names, network, numel, density, ranks, plan.repeats, tuple(plan.values))
                    measured = run_on(network, ranks, measure, cell, on_report=lambda report: progress(*report))
                    rows += _rows(cell, measured)
    return Report(environment(), rows)


def _check(plan: ReducePlan) -> None:
    """Raise every input error before anything is measured."""
    for name in plan.recipes:
        RECIPES[name]
    for code in plan.values:
        recipe("oktopk", values=code)
    for name in plan.baselines:
        BASELINES[name]
    check_networks(plan.networks, max(plan.ranks))
    # The drawn tensor, the gradient and the baselines' parameters; vectors of recipes; buckets and states of hooks.
    vectors = 3 + sum(map(_vectors_kept, plan.recipes)) * len(plan.values) + 4 * len(plan.baselines)
    remedy = "use a smaller --numel, fewer --ranks, --recipe or --peer"
    require_memory(4 * vectors * max(plan.numels) * max(plan.ranks), remedy)


def _vectors_kept(name: str) -> int:
    """Each vector a recipe keeps exists twice, before and after the step; one more for entries in transit."""
    feedback = recipe(name).feedback
    return 2 * len(feedback.vectors(feedback.init(Pieces([torch.zeros(1)])))) + 1


def measure(process: RankProcess, cell: Cell) -> dict[str, list[StepSample]]:
    """One rank's part of a cell. Returns the measurements by contender."""
    gradients = Gradients(cell.numel, rank=process.rank)
    grad = torch.empty(cell.numel)
    k = max(1, round(cell.numel * cell.density))
    meter = Meter(in_network=cell.network != LOOPBACK)
    contenders: dict[str, Contender[StepSample]] = {BACKEND: BackendContender(grad, meter)}
    for coded, (name, code) in cell.coded_recipes.items():
        contenders[coded] = RecipeContender(recipe(name, values=code), grad, k, meter)
    parameters = torch.zeros(cell.numel if cell.baselines else 0)
    for name in cell.baselines:
        contenders[name] = BaselineContender(BASELINES[name], parameters, meter)
    what = f"{cell.ranks} ranks, {cell.network}, numel {cell.numel:,}, density {cell.density:g}"
    report = (lambda *progress: process.report(progress)) if process.rank == 0 else silent
    return contest(what, contenders, gradients, cell.repeats, report)


def _rows(cell: Cell, measured: Sequence[dict[str, list[StepSample]]]) -> list[Row]:
    slowest = {
        name: [max(s.seconds for s in step) for step in zip(*(rank[name] for rank in measured), strict=True)]
        for name in measured[0]
    }
    dense = statistics.median(slowest[BACKEND])
    return [
        {
            "recipe": cell.coded_recipes.get(name, (name, ""))[0],
            "values": cell.coded_recipes.get(name, (name, ""))[1],
            "peer": name not in cell.coded_recipes,
            "network": cell.network,
            "numel": cell.numel,
            "density": cell.density,
            "ranks": cell.ranks,
            "threads": threads_per_rank(cell.ranks),
            "repeats": cell.repeats,
            "step": "ordinary",
            "seconds": statistics.median(seconds),
            "speedup_over_dense": dense / statistics.median(seconds),
            **_traffic([rank[name] for rank in measured]),
            "raw_seconds": seconds,
        }
        for name, seconds in slowest.items()
    ]


def _traffic(steps_of_ranks: Sequence[Sequence[StepSample]]) -> Row:
    """The traffic that could be counted: for each field the median over steps of the rank that has most."""
    fields: dict[str, Callable[[StepSample], int | None]] = {
        "bytes_received_per_rank": lambda step: None if step.traffic is None else step.traffic.bytes_received,
        "messages_per_rank": lambda step: None if step.traffic is None else step.traffic.messages_received,
        "calls_per_step": lambda step: None if step.traffic is None else step.traffic.calls,
        "interface_bytes_received_per_rank": lambda step: step.interface_bytes,
    }
    row: Row = {}
    for field, count in fields.items():
        counts = [[number for step in steps if (number := count(step)) is not None] for steps in steps_of_ranks]
        if all(counts):
            row[field] = max(map(statistics.median_high, counts))
    return row
