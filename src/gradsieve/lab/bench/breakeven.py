"""From which bandwidth on is dense good enough? From exchanges that were measured on several networks.

The time of an exchange is taken as a + c * x, where x is the time its bytes take at the link's rate: a is what the
processors do whatever the network, c how well a link is filled (both fitted to the measured networks). A step that
computes for t seconds hides up to two thirds of t, the share of backward, behind itself, for all methods alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gradsieve.errors import InputError
from gradsieve.lab.bench.picture import name_of
from gradsieve.lab.bench.report import BACKEND, Column, Report, Row, thousands
from gradsieve.lab.network.rate import Rate
from gradsieve.lab.network.topology import split_profile

HIDING_SHARE = 2 / 3
RATES = np.geomspace(1e6, 100e9, 2001)  # bits a second
CELL = ("numel", "density", "ranks")  # what is measured together, on each network
NEEDED = (*CELL, "network", "recipe", "peer", "seconds")
MACHINE = ("cpu", "cores")  # of an environment
AHEAD = 1.02  # times faster, to count as faster

Array = np.ndarray[Any, np.dtype[np.float64]]

COLUMNS = (
    Column("recipe", "recipe"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("step_seconds", "compute", lambda value: f"{value * 1e3:g} ms"),
    Column("over_dense", "beats dense", lambda value: range_text(value)),
    Column("over_peers", "beats every peer", lambda value: range_text(value)),
    Column("slower_links", "best below that"),
    Column("faster_links", "best above that"),
    Column("fixed_seconds", "fixed", lambda value: f"{value * 1e3:.3g} ms"),
    Column("filling", "of the link's rate", lambda value: f"{value:.0%}"),
)


@dataclass(frozen=True)
class Line:
    """The time of an exchange at any rate."""

    name: str
    peer: bool
    fixed_seconds: float
    bits: float  # as many as would take so long on a link that is filled
    filling: float  # share of a link's rate that is reached; 1 where no network was slow enough to tell

    def steps(self, step_seconds: float) -> Array:
        """What a step that computes so long takes, at all rates."""
        exchange = self.fixed_seconds + self.bits / RATES
        return np.asarray(step_seconds + np.maximum(0.0, exchange - HIDING_SHARE * step_seconds))


def break_even(results: Sequence[Row], environment: dict[str, Any], steps: Sequence[float]) -> Report:
    """A row for each recipe, each combination that was measured, and each time of computing."""
    for step_seconds in steps:
        if not 0 <= step_seconds < math.inf:
            raise InputError(f"a step must compute for 0 ms or longer, got {step_seconds * 1e3:g} ms")
    rows: list[Row] = []
    for condition in dict.fromkeys(map(_condition, results)):
        alike = [row for row in results if _condition(row) == condition]
        lines = [_fitted([row for row in alike if name_of(row) == name]) for name in dict.fromkeys(map(name_of, alike))]
        for step_seconds in steps:
            rows += _compared(lines, step_seconds, dict(zip(CELL, condition, strict=True)))
    return Report(environment, rows)


def read_reports(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """What `bench reduce --network … --json` has written, once or in several runs on one machine."""
    results: list[Row] = []
    environments = []
    for path in paths:
        rows, environment = _read(path)
        results += rows
        environments.append(environment)
        if any(environment.get(name) != environments[0].get(name) for name in MACHINE):
            raise InputError(f"{path} was not measured on the machine of {paths[0]}: their times cannot be compared")
    usable = _on_two_networks(results)
    if not any(row["recipe"] != BACKEND for row in usable):
        names = " and ".join(map(str, paths))
        raise InputError(f"{names}: no recipe was measured on two networks, together with dense")
    return usable, environments[0]


def _read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        results = [row for row in content["results"] if "interface_bytes_received_per_rank" in row]
        for row in results:
            itemgetter(*NEEDED)(row)
        return results, dict(content["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not what bench reduce --network … --json prints ({error!r})") from None


def _on_two_networks(results: Sequence[Row]) -> list[Row]:
    """What a line can be fitted to, where dense has one as well."""
    networks: dict[tuple[Any, ...], set[str]] = {}
    for row in results:
        networks.setdefault((_condition(row), name_of(row)), set()).add(row["network"])
    return [
        row
        for row in results
        if len(networks[_condition(row), name_of(row)]) > 1 and len(networks.get((_condition(row), BACKEND), ())) > 1
    ]


def _condition(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL)


def range_text(rates: Sequence[float] | None) -> str:
    """Such as `below 3.4 Gbit/s`; never or always where it does not depend on the network."""
    if rates is None:
        return "never"
    low, high = rates
    if low <= RATES[0]:
        return "always" if high >= RATES[-1] else f"below {_rate_text(high)}"
    return f"above {_rate_text(low)}" if high >= RATES[-1] else f"{_rate_text(low)} to {_rate_text(high)}"


def _rate_text(bits_per_second: float) -> str:
    scale, unit = (1e9, "Gbit/s") if bits_per_second >= 1e9 else (1e6, "Mbit/s")
    return f"{bits_per_second / scale:.3g} {unit}"


def _fitted(rows: Sequence[Row]) -> Line:
    """By least squares, relative to what was measured: a slow network must not outweigh the others."""
    bits = [8 * row["interface_bytes_received_per_rank"] for row in rows]
    times = np.array([row["seconds"] for row in rows])
    ideal = np.array([b / rate if (rate := _rate(row)) else 0.0 for b, row in zip(bits, rows, strict=True)])
    system = np.stack([np.ones_like(ideal), ideal], axis=1) / times[:, None]
    fixed, slope = np.linalg.lstsq(system, np.ones_like(times), rcond=None)[0]
    slope = max(float(slope), 1.0) if ideal.any() else 1.0  # no exchange is faster than its link
    fixed = max(0.0, float(fixed))
    return Line(name_of(rows[0]), rows[0]["peer"], fixed, slope * float(np.mean(bits)), 1 / slope)


def _rate(row: Row) -> int | None:
    return Rate.parse(split_profile(row["network"])[0]).bits_per_second


def _compared(lines: Sequence[Line], step_seconds: float, condition: Row) -> list[Row]:
    times = {line.name: line.steps(step_seconds) for line in lines}
    peers = {line.name: times[line.name] for line in lines if line.peer}
    rows = []
    for line in lines:
        if not line.peer:
            over_peers = _range(times[line.name], np.min(list(peers.values()), axis=0))
            rows.append({
                "recipe": line.name,
                **condition,
                "step_seconds": step_seconds,
                "over_dense": _range(times[line.name], times[BACKEND]),
                "over_peers": over_peers,
                **_winners(peers, over_peers),
                "fixed_seconds": line.fixed_seconds,
                "filling": line.filling,
            })  # fmt: skip
    return rows


def _range(own: Array, other: Array) -> list[float] | None:
    """The widest range of rates in which `own` is faster; None if there is none."""
    ahead = np.concatenate([[False], own * AHEAD <= other, [False]])
    edges = np.flatnonzero(ahead[1:] != ahead[:-1]).reshape(-1, 2)
    if edges.size == 0:
        return None
    first, last = max(edges.tolist(), key=lambda pair: pair[1] - pair[0])
    return [float(RATES[first]), float(RATES[last - 1])]


def _winners(peers: dict[str, Array], within: Sequence[float] | None) -> Row:
    """Which peer is fastest on links just slower than the range, and just faster."""
    if within is None:
        return {}
    first, last = (int(np.searchsorted(RATES, rate)) for rate in within)
    places = {"slower_links": first - 1, "faster_links": last + 1}
    return {
        name: min(peers, key=lambda peer: peers[peer][place])
        for name, place in places.items()
        if 0 <= place < RATES.size
    }
