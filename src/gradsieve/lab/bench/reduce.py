"""Time of the whole data path on real processes: from the gradient to the mean written back over it.

Ranks meet over loopback, or each in a host of its own on a network of limited links, together with the peers that a
user might pick instead. All take turns within a repeat. Ranks start at the same moment; a step has taken as long as the
slowest rank. The row `gloo all_reduce` is the backend alone on the same tensor, and what `speedup_over_dense`
refers to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm import CountingComm, TorchComm, Traffic
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS, Contender, Progress, contest, silent
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.meter import Exchanged, Meter
from gradsieve.lab.bench.peers import PeerContender
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
from gradsieve.lab.peers import PEERS
from gradsieve.lab.workers import TIMEOUT_SECONDS, Worker, threads_per_worker
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
    Column("seconds", "step", milliseconds),
    Column("speedup_over_dense", "gloo /", times),
    Column("bytes_received_per_rank", "received", megabytes),
    Column("interface_bytes_received_per_rank", "by interface", megabytes),
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
    networks: Sequence[str] = (LOOPBACK,)  # or `1gbit`, `1gbit+5ms`: every rank in a host of its own
    peers: Sequence[str] = ()
    values: Sequence[str] = (OWN,)  # codes; a recipe that has none, such as dense, runs once


class Cell(NamedTuple):
    """One combination."""

    recipes: tuple[str, ...]
    peers: tuple[str, ...]
    network: str
    numel: int
    density: float
    ranks: int
    repeats: int
    values: tuple[str, ...]

    @property
    def mixtures(self) -> dict[str, tuple[str, str]]:
        """Recipes with codes, by the name they have in the contest."""
        mixed = {}
        for name in self.recipes:
            own = recipe(name).reducer.codec.values
            for code in self.values if name != "dense" else (OWN,):
                mixed[name if code in (OWN, own) else f"{name} {code}"] = name, own if code == OWN else code
        return mixed


class RecipeContender:
    """A recipe in a pipeline, its traffic counted."""

    def __init__(self, chosen: Recipe, grad: Tensor, k: int, meter: Meter) -> None:
        self.k = k
        self._meter = meter
        self.warmup_steps = DENSE_WARMUP_STEPS if isinstance(chosen.reducer, Dense) else RESIDUAL_WARMUP_STEPS
        self._grad = grad
        self._comm = CountingComm(TorchComm(timeout_seconds=TIMEOUT_SECONDS))
        self._pipeline = Pipeline(chosen, self._comm)
        self._state = self._pipeline.init(Pieces([grad]))

    def step(self, grad: Tensor) -> Exchanged:
        """A whole step in place, on a copy."""
        self._grad.copy_(grad)
        self._comm.reset()
        return self._meter(self._run).with_traffic(self._comm.reset())

    def _run(self) -> None:
        self._state = self._pipeline.step(self._grad, self.k, self._state, self._grad)


class BackendContender:
    """The backend's own all_reduce and a division, nothing else."""

    warmup_steps = DENSE_WARMUP_STEPS

    def __init__(self, grad: Tensor, meter: Meter) -> None:
        self._grad = grad
        self._meter = meter
        self._size = dist.get_world_size()

    def step(self, grad: Tensor) -> Exchanged:
        """See the class. Traffic is what a bandwidth-optimal all_reduce needs, as `CountingComm` counts it."""
        self._grad.copy_(grad)
        others = self._size - 1
        num_bytes = 2 * others * self._grad.numel() * self._grad.element_size() // self._size
        return self._meter(self._run).with_traffic(Traffic(1, 2 * others, 2 * others, num_bytes, num_bytes))

    def _run(self) -> None:
        dist.all_reduce(self._grad)
        self._grad.div_(self._size)


def bench_reduce(plan: ReducePlan, progress: Progress = silent) -> Report:
    """Measure all combinations, each with its own set of processes."""
    _check(plan)
    rows: list[Row] = []
    for network in plan.networks:
        for ranks in plan.ranks:
            for numel in plan.numels:
                for density in plan.densities:
                    names = tuple(plan.recipes), tuple(plan.peers)
                    cell = Cell(*names, network, numel, density, ranks, plan.repeats, tuple(plan.values))
                    measured = run_on(network, ranks, measure, cell, on_report=lambda told: progress(*told))
                    rows += _rows(cell, measured)
    return Report(environment(), rows)


def _check(plan: ReducePlan) -> None:
    """Whatever is wrong is an error here, not in a worker after minutes."""
    for name in plan.recipes:
        RECIPES[name]
    for code in plan.values:
        recipe("oktopk", values=code)
    for name in plan.peers:
        PEERS[name]
    check_networks(plan.networks, max(plan.ranks))
    # What is drawn, the gradient, the peers' parameters; what recipes keep; a peer's buckets and the state of its hook.
    vectors = 3 + sum(map(_vectors_kept, plan.recipes)) * len(plan.values) + 4 * len(plan.peers)
    remedy = "use a smaller --numel, fewer --ranks, --recipe or --peer"
    require_memory(4 * vectors * max(plan.numels) * max(plan.ranks), remedy)


def _vectors_kept(name: str) -> int:
    """Each that a recipe remembers is there twice, as it was before the step and after; and entries on their way."""
    feedback = recipe(name).feedback
    return 2 * len(feedback.vectors(feedback.init(Pieces([torch.zeros(1)])))) + 1


def measure(worker: Worker, cell: Cell) -> dict[str, list[Exchanged]]:
    """One rank's part of a cell."""
    gradients = Gradients(cell.numel, rank=worker.rank)
    grad = torch.empty(cell.numel)
    k = max(1, round(cell.numel * cell.density))
    meter = Meter(in_network=cell.network != LOOPBACK)
    contenders: dict[str, Contender[Exchanged]] = {BACKEND: BackendContender(grad, meter)}
    for mixture, (name, code) in cell.mixtures.items():
        contenders[mixture] = RecipeContender(recipe(name, values=code), grad, k, meter)
    parameters = torch.zeros(cell.numel if cell.peers else 0)
    for name in cell.peers:
        contenders[name] = PeerContender(PEERS[name], parameters, meter)
    what = f"{cell.ranks} ranks, {cell.network}, numel {cell.numel:,}, density {cell.density:g}"
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
            "recipe": cell.mixtures.get(name, (name, ""))[0],
            "values": cell.mixtures.get(name, (name, ""))[1],
            "peer": name not in cell.mixtures,
            "network": cell.network,
            "numel": cell.numel,
            "density": cell.density,
            "ranks": cell.ranks,
            "threads": threads_per_worker(cell.ranks),
            "repeats": cell.repeats,
            "step": "ordinary",
            "seconds": statistics.median(seconds),
            "speedup_over_dense": dense / statistics.median(seconds),
            **_traffic([rank[name] for rank in measured]),
            "raw_seconds": seconds,
        }
        for name, seconds in slowest.items()
    ]


def _traffic(steps_of_ranks: Sequence[Sequence[Exchanged]]) -> Row:
    """What could be counted: of each the most that any rank has, in the median over its steps."""
    fields: dict[str, Callable[[Exchanged], int | None]] = {
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
