"""Bytes on the wire: what an entry costs in every code, and what a rank receives in a step.

Four kinds of rows. `traffic`: Ok-Topk with error feedback on synthetic gradients, every byte counted that a rank
receives, headers included; ranks are threads, or processes in hosts of a limited network, where the bytes of the
interface are counted too. `updates`: likewise the updates that `attach(model, optimizer=...)` exchanges, one bit for
each entry whose turn it is; ranks are threads. `indices`: what sorted indices take, against their entropy. `speed`:
encoding and decoding one message on one thread, in gigabytes of plain entries (8 bytes each) a second.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gradsieve.comm import Comm, CountingComm, TorchComm
from gradsieve.engine import Settings
from gradsieve.engine.groups import cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.engine.schedules import Constant
from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS, Progress, silent
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import Column, Report, Row, environment, megabytes, thousands, times
from gradsieve.lab.bench.site import check_networks, run_on
from gradsieve.lab.machine import require_memory
from gradsieve.lab.network import interface_counters
from gradsieve.lab.workers import TIMEOUT_SECONDS, Worker
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import recipe
from gradsieve.reducers.cost import lower_bound_words
from gradsieve.testing import run_ranks
from gradsieve.updates import UpdateEngine, for_updates
from gradsieve.updates.defaults import DEFAULT_UPDATE_DENSITY, DEFAULT_UPDATE_RECIPE
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces
from gradsieve.wire import Codec
from gradsieve.wire.indices import INDEX_CODES
from gradsieve.wire.message import Expected, unpack

THREADS = "threads"  # for a network
INDEX_DENSITIES = (0.001, 0.01, 0.02, 0.1)
UPDATE_DENSITIES = (1.0, DEFAULT_UPDATE_DENSITY, 0.25, 0.125)
ENTRY_BYTES = 8  # int32 and float32, as the papers count

COLUMNS = (
    Column("kind", "kind"),
    Column("values", "values"),
    Column("indices", "indices"),
    Column("pattern", "pattern"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("bytes_per_entry", "bytes/entry", lambda value: f"{value:.2f}"),
    Column("bytes_received_per_rank", "received", megabytes),
    Column("interface_bytes_received_per_rank", "by interface", megabytes),
    Column("of_lower_bound", "of lower bound", times),
    Column("fewer_bytes", "dense /", times),
    Column("of_entropy", "of entropy", times),
    Column("encode_gigabytes_per_second", "encode GB/s", lambda value: f"{value:.2f}"),
    Column("decode_gigabytes_per_second", "decode GB/s", lambda value: f"{value:.2f}"),
)


@dataclass(frozen=True)
class WirePlan:
    """What to measure."""

    values: Sequence[str]
    indices: Sequence[str]
    densities: Sequence[float]
    ranks: Sequence[int]
    numel: int
    repeats: int
    networks: Sequence[str] = (THREADS,)


class Cell(NamedTuple):
    """One combination."""

    values: str
    indices: str
    density: float
    ranks: int
    numel: int
    repeats: int
    network: str

    @property
    def k(self) -> int:
        """Entries to keep."""
        return max(1, round(self.numel * self.density))


class Received(NamedTuple):
    """One step of one rank."""

    num_bytes: int
    num_entries: int  # sparse entries in its messages, as far as their number follows from counts: local and total
    interface_bytes: int | None


def bench_wire(plan: WirePlan, progress: Progress = silent) -> Report:
    """All traffic, then indices alone, then speed."""
    if min(plan.ranks) < 2:
        raise InputError(f"ranks must be at least 2, or nothing is sent, got {min(plan.ranks)}")
    check_networks((network for network in plan.networks if network != THREADS), max(plan.ranks))
    vectors = 4  # what is drawn, the gradient, residual and spare
    require_memory(4 * vectors * plan.numel * max(plan.ranks), "use a smaller --numel or fewer --ranks")
    cells = [
        Cell(values, indices, density, ranks, plan.numel, plan.repeats, network)
        for network in plan.networks
        for ranks in plan.ranks
        for density in plan.densities
        for indices in plan.indices
        for values in plan.values
    ]
    rows: list[Row] = []
    for number, cell in enumerate(cells):
        progress(f"{cell.ranks} ranks, {cell.values}, {cell.network}", number, len(cells))
        rows.append(_traffic_row(cell, _run(cell)))
    for ranks in plan.ranks:
        progress(f"{ranks} ranks, updates", len(cells), len(cells))
        rows += [_updates_row(plan.numel, density, ranks) for density in UPDATE_DENSITIES]
    rows += [_index_row(plan.numel, density, pattern) for density in INDEX_DENSITIES for pattern in PATTERNS]
    rows += [_speed_row(plan.numel, plan.densities[0], values, code) for values in plan.values for code in plan.indices]
    progress("done", len(cells), len(cells))
    return Report(environment(), rows)


def _run(cell: Cell) -> list[list[Received]]:
    if cell.network == THREADS:
        return run_ranks(cell.ranks, lambda comm: _steps(comm, cell, in_network=False), timeout_seconds=600)
    return run_on(cell.network, cell.ranks, _in_network, cell)


def _in_network(worker: Worker, cell: Cell) -> list[Received]:
    return _steps(TorchComm(timeout_seconds=TIMEOUT_SECONDS), cell, in_network=True)


def _steps(comm: Comm, cell: Cell, *, in_network: bool) -> list[Received]:
    """One rank's steps, after the residual has settled."""
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


def _traffic_row(cell: Cell, ranks: Sequence[Sequence[Received]]) -> Row:
    """Means over the steps, of the rank that receives most."""
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
        by_interface = [statistics.mean(step.interface_bytes or 0 for step in steps) for steps in ranks]
        row["interface_bytes_received_per_rank"] = max(by_interface)
    return row


def _updates_row(numel: int, density: float, ranks: int) -> Row:
    """Of the rank that receives most, over one turn of every entry."""
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
    """In a step, of one rank."""
    parameters = {"weights": torch.zeros(numel)}
    settings = for_updates(Settings(recipe(DEFAULT_UPDATE_RECIPE), Constant(density)))
    counting = CountingComm(comm)
    engine = UpdateEngine(cut_into_groups(parameters, Rules(min_dimensions=1), None), settings, counting, parameters)
    counting.reset()
    turns = round(1 / density)
    for _ in range(turns):
        engine.residual("weights").add_(Gradients(numel, rank=comm.rank).fresh())
        engine.exchange_all()
    return counting.traffic.bytes_received / turns


def _uniform(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(numel, generator=generator) < density


def _clustered(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    """All in stretches of 1000 entries, a quarter of which are picked."""
    stretches = torch.rand(-(-numel // 1000), generator=generator) < 4 * density
    inside = stretches.repeat_interleave(1000)[:numel]
    return inside & (torch.rand(numel, generator=generator) < 0.25)


PATTERNS: dict[str, Callable[[int, float, torch.Generator], torch.Tensor]] = {
    "uniform": _uniform,
    "clustered": _clustered,
}


def _index_row(numel: int, density: float, pattern: str) -> Row:
    """Against n H(k/n), the entropy of a set of that size that could be any."""
    picked = PATTERNS[pattern](numel, density, torch.Generator().manual_seed(0))
    indices = picked.nonzero().flatten().int().numpy()
    code = INDEX_CODES["auto"](indices, 0)
    share = indices.size / numel
    entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return {
        "kind": "indices",
        "indices": type(code).__name__.lower(),
        "pattern": pattern,
        **_conditions(numel, density),
        "bytes_per_entry": 8 * code.num_words / indices.size,
        "of_entropy": 64 * code.num_words / entropy_bits,
    }


def _speed_row(numel: int, density: float, values: str, indices: str) -> Row:
    """One message with all picks of one rank."""
    generator = torch.Generator().manual_seed(0)
    places = _uniform(numel, density, generator).nonzero().flatten()
    picks = torch.randn(places.numel(), generator=generator)
    vector = SparseVector(places, picks + picks.sign(), numel)  # all well above zero, as picked entries are
    expected = Expected(0, numel, 1, torch.float32, torch.device("cpu"))
    codec = Codec(values, indices)
    packed = codec.pack(vector, expected, 0)
    encode = _median_seconds(lambda: codec.pack(vector, expected, 0))
    decode = _median_seconds(lambda: unpack(packed.message, expected, 0, numel, 1))
    gigabytes = ENTRY_BYTES * vector.nnz / 1e9
    return {
        "kind": "speed",
        "values": values,
        "indices": indices,
        **_conditions(numel, density),
        "bytes_per_entry": packed.message.numel() / vector.nnz,
        "encode_gigabytes_per_second": gigabytes / encode,
        "decode_gigabytes_per_second": gigabytes / decode,
    }


def _conditions(numel: int, density: float) -> dict[str, Any]:
    return {"numel": numel, "density": density, "ranks": 1, "threads": 1}


def _median_seconds(work: Callable[[], object]) -> float:
    """The median of several: the first call compiles."""
    work()
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))
