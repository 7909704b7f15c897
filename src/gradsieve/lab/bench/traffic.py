"""Bytes that a rank receives per step: Ok-Topk in any code, and the exchange of updates. Rows of `bench wire`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsieve.comm import Comm, CountingComm, TorchComm
from gradsieve.engine import Settings
from gradsieve.engine.groups import cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.engine.schedules import Constant
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import Row
from gradsieve.lab.bench.site import run_on
from gradsieve.lab.network import interface_counters
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS, RankProcess
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import recipe
from gradsieve.reducers.cost import lower_bound_words
from gradsieve.testing import run_ranks
from gradsieve.updates import UpdateEngine, for_updates
from gradsieve.updates.defaults import DEFAULT_UPDATE_RECIPE
from gradsieve.vector.pieces import Pieces

THREADS = "threads"  # as the name of a network: ranks are threads of one process


class Cell(NamedTuple):
    """One combination of codes and conditions."""

    values: str
    indices: str
    density: float
    ranks: int
    numel: int
    repeats: int
    network: str

    @property
    def k(self) -> int:
        """Entries that each rank selects."""
        return max(1, round(self.numel * self.density))


class Received(NamedTuple):
    """Traffic of one step on one rank."""

    num_bytes: int
    num_entries: int  # sparse entries received, estimated from the numbers of selected and of delivered entries
    interface_bytes: int | None


def traffic_row(cell: Cell) -> Row:
    """Means over the steps, of the rank that receives most."""
    ranks = _run(cell)
    means = [statistics.mean(step.num_bytes for step in steps) for steps in ranks]
    busiest = ranks[means.index(max(means))]
    row: Row = {
        "kind": "traffic",
        "recipe": "oktopk",
        **cell._asdict(),
        "threads": torch.get_num_threads(),
        "bytes_per_entry": max(means) / statistics.mean(step.num_entries for step in busiest),
        "bytes_received_per_rank": max(means),
        "of_lower_bound": max(means) / (4 * lower_bound_words(cell.ranks, cell.k)),
        "raw_bytes_received": [[step.num_bytes for step in steps] for steps in ranks],
    }
    if cell.network != THREADS:
        at_interface = [statistics.mean(step.interface_bytes or 0 for step in steps) for steps in ranks]
        row["interface_bytes_received_per_rank"] = max(at_interface)
    return row


def _run(cell: Cell) -> Sequence[Sequence[Received]]:
    if cell.network == THREADS:
        return run_ranks(cell.ranks, lambda comm: _steps(comm, cell, in_network=False), timeout_seconds=600)
    return run_on(cell.network, cell.ranks, _in_network, cell)


def _in_network(process: RankProcess, cell: Cell) -> list[Received]:
    return _steps(TorchComm(timeout_seconds=TIMEOUT_SECONDS), cell, in_network=True)


def _steps(comm: Comm, cell: Cell, *, in_network: bool) -> list[Received]:
    """One rank's steps, after the residual has become stable."""
    gradients, grad = Gradients(cell.numel, rank=comm.rank), torch.empty(cell.numel)
    counting = CountingComm(comm)
    pipeline = Pipeline(recipe("oktopk", values=cell.values, indices=cell.indices), counting)
    state, received = pipeline.init(Pieces([grad])), []
    for step in range(RESIDUAL_WARMUP_STEPS + cell.repeats):
        grad.copy_(gradients.fresh())
        counting.reset()
        before = interface_counters().bytes_received if in_network else 0
        state = pipeline.step(grad, cell.k, state, grad)
        interface_bytes = interface_counters().bytes_received - before if in_network else None
        if step >= RESIDUAL_WARMUP_STEPS:
            total = int(grad.count_nonzero())
            entries = round((cell.k + total) * (comm.size - 1) / comm.size)
            received.append(Received(counting.traffic.bytes_received, entries, interface_bytes))
    return received


def updates_row(numel: int, density: float, ranks: int) -> Row:
    """Means over the steps in which every entry is sent once, of the rank that receives most."""
    received = run_ranks(ranks, lambda comm: _bytes_of_updates(comm, numel, density), timeout_seconds=600)
    dense = 2 * (ranks - 1) / ranks * numel * torch.float32.itemsize
    return {
        "kind": "updates",
        "recipe": DEFAULT_UPDATE_RECIPE,
        "values": "bit",
        "numel": numel,
        "density": density,
        "ranks": ranks,
        "network": THREADS,
        "threads": torch.get_num_threads(),
        "bytes_per_entry": max(received) / (2 * (ranks - 1) / ranks * numel * density),
        "bytes_received_per_rank": max(received),
        "fewer_bytes": dense / max(received),
    }


def _bytes_of_updates(comm: Comm, numel: int, density: float) -> float:
    """Mean bytes received per step by this rank."""
    parameters = {"weights": torch.zeros(numel)}
    settings = for_updates(Settings(recipe(DEFAULT_UPDATE_RECIPE), Constant(density)))
    counting = CountingComm(comm)
    engine = UpdateEngine(cut_into_groups(parameters, Rules(min_dimensions=1), None), settings, counting, parameters)
    counting.reset()
    steps = round(1 / density)  # the window passes every entry once
    for _ in range(steps):
        engine.residual("weights").add_(Gradients(numel, rank=comm.rank).fresh())
        engine.exchange_all()
    return counting.traffic.bytes_received / steps
