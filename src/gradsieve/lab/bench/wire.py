"""Bytes of messages: what an entry costs in every code, and what a rank receives per step.

There are four kinds of rows:

- `traffic`: Ok-Topk with error feedback on synthetic gradients. Every byte that a rank receives is counted, headers
  included. Ranks are threads, or processes in hosts of a limited network, where bytes at the interface are counted too.
- `updates`: the same for the updates that `attach(model, optimizer=...)` exchanges, one bit per entry of the current
  window. Ranks are threads.
- `indices`: the size of sorted indices, relative to their entropy.
- `speed`: encoding and decoding one message on one thread, in gigabytes of plain entries (8 bytes each) per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.errors import InputError
from gradsieve.lab.bench.codes import PATTERNS, index_row, speed_row
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.report import Column, Report, Row, environment, megabytes, thousands, times
from gradsieve.lab.bench.site import check_networks
from gradsieve.lab.bench.traffic import THREADS, Cell, traffic_row, updates_row
from gradsieve.lab.machine import require_memory
from gradsieve.updates.defaults import DEFAULT_UPDATE_DENSITY

__all__ = ["COLUMNS", "THREADS", "WirePlan", "bench_wire"]

INDEX_DENSITIES = (0.001, 0.01, 0.02, 0.1)
UPDATE_DENSITIES = (1.0, DEFAULT_UPDATE_DENSITY, 0.25, 0.125)

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
    Column("interface_bytes_received_per_rank", "at interface", megabytes),
    Column("of_lower_bound", "vs lower bound", times),
    Column("fewer_bytes", "vs dense", times),
    Column("of_entropy", "vs entropy", times),
    Column("encode_gigabytes_per_second", "encode GB/s", lambda value: f"{value:.2f}"),
    Column("decode_gigabytes_per_second", "decode GB/s", lambda value: f"{value:.2f}"),
)


@dataclass(frozen=True)
class WirePlan:
    """What to measure: every combination."""

    values: Sequence[str]
    indices: Sequence[str]
    densities: Sequence[float]
    ranks: Sequence[int]
    numel: int
    repeats: int
    networks: Sequence[str] = (THREADS,)


def bench_wire(plan: WirePlan, progress: Progress = silent) -> Report:
    """Measure the four kinds of rows one after the other."""
    if min(plan.ranks) < 2:
        raise InputError(f"ranks must be at least 2, or nothing is sent, got {min(plan.ranks)}")
    check_networks((network for network in plan.networks if network != THREADS), max(plan.ranks))
    vectors = 4  # the drawn tensor, the gradient, the residual and its spare
    require_memory(4 * vectors * plan.numel * max(plan.ranks), "use a smaller --numel or fewer --ranks")
    cells = _cells(plan)
    rows: list[Row] = []
    for number, cell in enumerate(cells):
        progress(f"{cell.ranks} ranks, {cell.values}, {cell.network}", number, len(cells))
        rows.append(traffic_row(cell))
    for ranks in plan.ranks:
        progress(f"{ranks} ranks, updates", len(cells), len(cells))
        rows += [updates_row(plan.numel, density, ranks) for density in UPDATE_DENSITIES]
    rows += [index_row(plan.numel, density, pattern) for density in INDEX_DENSITIES for pattern in PATTERNS]
    rows += [speed_row(plan.numel, plan.densities[0], values, code) for values in plan.values for code in plan.indices]
    progress("done", len(cells), len(cells))
    return Report(environment(), rows)


def _cells(plan: WirePlan) -> list[Cell]:
    return [
        Cell(values, indices, density, ranks, plan.numel, plan.repeats, network)
        for network in plan.networks
        for ranks in plan.ranks
        for density in plan.densities
        for indices in plan.indices
        for values in plan.values
    ]
