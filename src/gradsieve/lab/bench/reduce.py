"""Time of the whole data path on real processes: from the gradient to the mean written back over it.

All recipes take turns within a repeat. Ranks start together, after a barrier; a step has taken as long as the slowest
rank. The row `gloo all_reduce` is the backend alone on the same tensor, and what `speedup_over_dense` refers to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm import CountingComm, TorchComm, Traffic
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS, Contender, Progress, contest, silent
from gradsieve.lab.bench.gradients import POOL, Gradients
from gradsieve.lab.bench.report import (
    Column,
    Report,
    Row,
    environment,
    megabytes,
    milliseconds,
    thousands,
    times,
)
from gradsieve.lab.machine import require_memory
from gradsieve.lab.workers import TIMEOUT_SECONDS, Worker, run_workers, threads_per_worker
from gradsieve.pieces import Pieces
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import RECIPES, Recipe

BACKEND = "gloo all_reduce"
DENSE_WARMUP_STEPS = 2

COLUMNS = (
    Column("recipe", "recipe"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("threads", "threads"),
    Column("seconds", "step", milliseconds),
    Column("speedup_over_dense", "gloo /", times),
    Column("bytes_received_per_rank", "received", megabytes),
    Column("messages_per_rank", "messages"),
    Column("calls_per_step", "calls"),
)


@dataclass(frozen=True)
class ReducePlan:
    """What to measure: every recipe under every combination of the others."""

    recipes: Sequence[str]
    numels: Sequence[int]
    densities: Sequence[float]
    ranks: Sequence[int]
    repeats: int


class Cell(NamedTuple):
    """One combination."""

    recipes: tuple[str, ...]
    numel: int
    density: float
    ranks: int
    repeats: int


class Exchanged(NamedTuple):
    """One step on one rank."""

    seconds: float
    traffic: Traffic


class RecipeContender:
    """A recipe in a pipeline, its traffic counted."""

    def __init__(self, recipe: Recipe, grad: Tensor, k: int) -> None:
        self.k = k
        self.warmup_steps = DENSE_WARMUP_STEPS if isinstance(recipe, RECIPES["dense"]) else RESIDUAL_WARMUP_STEPS
        self._grad = grad
        self._comm = CountingComm(TorchComm(timeout_seconds=TIMEOUT_SECONDS))
        self._pipeline = Pipeline(recipe, self._comm)
        self._state = self._pipeline.init(Pieces([grad]))

    def step(self, grad: Tensor) -> Exchanged:
        """A whole step in place, on a copy."""
        self._grad.copy_(grad)
        self._comm.reset()
        dist.barrier()
        started = time.perf_counter()
        self._state = self._pipeline.step(self._grad, self.k, self._state, self._grad)
        return Exchanged(time.perf_counter() - started, self._comm.reset())


class BackendContender:
    """The backend's own all_reduce and a division, nothing else."""

    warmup_steps = DENSE_WARMUP_STEPS

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad
        self._size = dist.get_world_size()

    def step(self, grad: Tensor) -> Exchanged:
        """See the class. Traffic is what a bandwidth-optimal all_reduce needs, as `CountingComm` counts it."""
        self._grad.copy_(grad)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(self._grad)
        self._grad.div_(self._size)
        seconds = time.perf_counter() - started
        others = self._size - 1
        num_bytes = 2 * others * self._grad.numel() * self._grad.element_size() // self._size
        return Exchanged(seconds, Traffic(1, 2 * others, 2 * others, num_bytes, num_bytes))


def bench_reduce(plan: ReducePlan, progress: Progress = silent) -> Report:
    """Measure all combinations, each with its own set of processes."""
    for name in plan.recipes:
        RECIPES[name]  # an unknown name is an error here, not in a worker
    # Each recipe keeps up to three vectors; the pool, the gradient, and what a dense step makes on the way.
    vectors = POOL + 3 + 3 * len(plan.recipes)
    require_memory(4 * vectors * max(plan.numels) * max(plan.ranks), "use a smaller --numel or fewer --recipe")
    rows: list[Row] = []
    for ranks in plan.ranks:
        for numel in plan.numels:
            for density in plan.densities:
                cell = Cell(tuple(plan.recipes), numel, density, ranks, plan.repeats)
                measured = run_workers(ranks, measure, cell, on_report=lambda told: progress(*told))
                rows += _rows(cell, measured)
    return Report(environment(), rows)


def measure(worker: Worker, cell: Cell) -> dict[str, list[Exchanged]]:
    """One rank's part of a cell."""
    gradients = Gradients(cell.numel, rank=worker.rank)
    grad = torch.empty(cell.numel)
    k = max(1, round(cell.numel * cell.density))
    contenders: dict[str, Contender[Exchanged]] = {BACKEND: BackendContender(grad)}
    for name in cell.recipes:
        recipe = cast(Callable[[], Recipe], RECIPES[name])()
        contenders[name] = RecipeContender(recipe, grad, k)
    what = f"{cell.ranks} ranks, numel {cell.numel:,}, density {cell.density:g}"
    report = (lambda *told: worker.report(told)) if worker.rank == 0 else silent
    return contest(what, contenders, gradients, cell.repeats, report)


def _rows(cell: Cell, measured: Sequence[dict[str, list[Exchanged]]]) -> list[Row]:
    slowest = {
        name: [max(s.seconds for s in step) for step in zip(*(rank[name] for rank in measured), strict=True)]
        for name in measured[0]
    }
    dense = statistics.median(slowest[BACKEND])
    return [
        {
            "recipe": name,
            "numel": cell.numel,
            "density": cell.density,
            "ranks": cell.ranks,
            "threads": threads_per_worker(cell.ranks),
            "repeats": cell.repeats,
            "step": "ordinary",
            "seconds": statistics.median(seconds),
            "speedup_over_dense": dense / statistics.median(seconds),
            "bytes_received_per_rank": _typical(measured, name, lambda t: t.bytes_received),
            "messages_per_rank": _typical(measured, name, lambda t: t.messages_received),
            "calls_per_step": _typical(measured, name, lambda t: t.calls),
            "raw_seconds": seconds,
        }
        for name, seconds in slowest.items()
    ]


def _typical(measured: Sequence[dict[str, list[Exchanged]]], name: str, count: Callable[[Traffic], int]) -> int:
    """The most that any rank has, in the median over its steps."""
    return max(statistics.median_high(count(step.traffic) for step in rank[name]) for rank in measured)
