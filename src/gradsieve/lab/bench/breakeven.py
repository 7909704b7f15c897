"""Below which bandwidth does a recipe beat dense? Computed from steps that were measured on several networks.

The time of an exchange is modelled as a + c x, where x is the time its bytes take at the link's rate. The constant a is
processor time, independent of the network. The factor c is the inverse of the link utilization. Both are fitted to the
measured networks. A step that computes for t seconds hides up to two thirds of t, the share of backward. That holds for
all methods alike.
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
from gradsieve.lab.bench.report import BACKEND, Column, Report, Row, method_name, thousands
from gradsieve.lab.network.rate import Rate
from gradsieve.lab.network.topology import split_profile

HIDING_SHARE = 2 / 3
RATES = np.geomspace(1e6, 100e9, 2001)  # bits per second
CELL = ("numel", "density", "ranks")  # conditions of one comparison, measured on each network
NEEDED = (*CELL, "network", "recipe", "peer", "seconds")
MACHINE = ("cpu", "cores")  # fields of an environment that must agree
AHEAD = 1.02  # a method counts as faster from this ratio on

Array = np.ndarray[Any, np.dtype[np.float64]]

COLUMNS = (
    Column("recipe", "recipe"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("step_seconds", "compute", lambda value: f"{value * 1e3:g} ms"),
    Column("over_dense", "beats dense", lambda value: range_text(value)),
    Column("over_peers", "beats every baseline", lambda value: range_text(value)),
    Column("slower_links", "fastest below"),
    Column("faster_links", "fastest above"),
    Column("fixed_seconds", "fixed time", lambda value: f"{value * 1e3:.3g} ms"),
    Column("filling", "link utilization", lambda value: f"{value:.0%}"),
)


@dataclass(frozen=True)
class Line:
    """The modelled time of one method's exchange at any rate."""

    name: str
    is_baseline: bool
    fixed_seconds: float
    bits: float  # received per step, divided by the utilization
    filling: float  # utilization of the link; 1 if no measured network was slow enough to tell

    def steps(self, step_seconds: float) -> Array:
        """Seconds per step at each of `RATES`, for a step that computes for `step_seconds`."""
        exchange = self.fixed_seconds + self.bits / RATES
        return np.asarray(step_seconds + np.maximum(0.0, exchange - HIDING_SHARE * step_seconds))


def break_even(results: Sequence[Row], environment: dict[str, Any], steps: Sequence[float]) -> Report:
    """One row per recipe, measured combination of conditions, and compute time per step in seconds."""
    for step_seconds in steps:
        if not 0 <= step_seconds < math.inf:
            raise InputError(f"the compute time per step must be 0 ms or more, got {step_seconds * 1e3:g} ms")
    rows: list[Row] = []
    for condition in dict.fromkeys(map(_condition, results)):
        alike = [row for row in results if _condition(row) == condition]
        names = dict.fromkeys(map(method_name, alike))
        lines = [_fitted([row for row in alike if method_name(row) == name]) for name in names]
        for step_seconds in steps:
            rows += _compared(lines, step_seconds, dict(zip(CELL, condition, strict=True)))
    return Report(environment, rows)


def read_reports(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """Rows and environment from the output of `bench reduce --network … --json`, all measured on one machine."""
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
        raise InputError(f"{path} is not the output of bench reduce --network … --json ({error!r})") from None


def _on_two_networks(results: Sequence[Row]) -> list[Row]:
    """The rows to which a line can be fitted: the method and dense were both measured on two networks or more."""
    networks: dict[tuple[Any, ...], set[str]] = {}
    for row in results:
        networks.setdefault((_condition(row), method_name(row)), set()).add(row["network"])
    return [
        row
        for row in results
        if len(networks[_condition(row), method_name(row)]) > 1
        and len(networks.get((_condition(row), BACKEND), ())) > 1
    ]


def _condition(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL)


def range_text(rates: Sequence[float] | None) -> str:
    """For example `below 3.4 Gbit/s`; `never` or `always` if it does not depend on the rate."""
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
    """Least squares of the relative error, so that a slow network does not outweigh the others."""
    bits = [8 * row["interface_bytes_received_per_rank"] for row in rows]
    times = np.array([row["seconds"] for row in rows])
    ideal = np.array([b / rate if (rate := _rate(row)) else 0.0 for b, row in zip(bits, rows, strict=True)])
    system = np.stack([np.ones_like(ideal), ideal], axis=1) / times[:, None]
    fixed, slope = np.linalg.lstsq(system, np.ones_like(times), rcond=None)[0]
    slope = max(float(slope), 1.0) if ideal.any() else 1.0  # no exchange is faster than its link
    fixed = max(0.0, float(fixed))
    return Line(method_name(rows[0]), rows[0]["peer"], fixed, slope * float(np.mean(bits)), 1 / slope)


def _rate(row: Row) -> int | None:
    return Rate.parse(split_profile(row["network"])[0]).bits_per_second


def _compared(lines: Sequence[Line], step_seconds: float, condition: Row) -> list[Row]:
    times = {line.name: line.steps(step_seconds) for line in lines}
    baselines = {line.name: times[line.name] for line in lines if line.is_baseline}
    rows = []
    for line in lines:
        if not line.is_baseline:
            over_baselines = _range(times[line.name], np.min(list(baselines.values()), axis=0))
            rows.append({
                "recipe": line.name,
                **condition,
                "step_seconds": step_seconds,
                "over_dense": _range(times[line.name], times[BACKEND]),
                "over_peers": over_baselines,
                **_fastest_beside(baselines, over_baselines),
                "fixed_seconds": line.fixed_seconds,
                "filling": line.filling,
            })  # fmt: skip
    return rows


def _range(own: Array, other: Array) -> list[float] | None:
    """The widest range of rates in which `own` is faster, or None if it never is."""
    ahead = np.concatenate([[False], own * AHEAD <= other, [False]])
    edges = np.flatnonzero(ahead[1:] != ahead[:-1]).reshape(-1, 2)
    if edges.size == 0:
        return None
    first, last = max(edges.tolist(), key=lambda pair: pair[1] - pair[0])
    return [float(RATES[first]), float(RATES[last - 1])]


def _fastest_beside(baselines: dict[str, Array], within: Sequence[float] | None) -> Row:
    """The fastest baseline just below the range of rates, and just above it."""
    if within is None:
        return {}
    first, last = (int(np.searchsorted(RATES, rate)) for rate in within)
    indices = {"slower_links": first - 1, "faster_links": last + 1}
    return {
        name: min(baselines, key=lambda baseline: baselines[baseline][index])
        for name, index in indices.items()
        if 0 <= index < RATES.size
    }
