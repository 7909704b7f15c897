"""Steps that were timed on a network, for a course of the loss that was trained without one.

A plan comes to the same parameters, bit for bit, on any network; so a loss needs no slow links to be known, only the
time of a step does. A few steps tell it. They are the same on every network, and whether they came to the same
parameters there is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradsieve.errors import MismatchError
from gradsieve.lab.bench.report import Row
from gradsieve.lab.peers import LOCAL_STEPS
from gradsieve.lab.train.comparison import run_name
from gradsieve.lab.train.exchange import Exchange
from gradsieve.lab.train.journal import METRICS, read_rows
from gradsieve.lab.train.plan import Plan

TIMED_RATE = 0.01  # of the run's: a schedule of a few steps warms up so quickly that runs would go astray


def timed_plan(run: Plan, steps: int, local_steps: int = 1) -> Plan:
    """At least so many steps after some that warm up, in stretches that hold one exchange of `local_steps` each."""
    stretch = max(LOCAL_STEPS, local_steps)
    total = warming_steps(local_steps) + stretch * -(-steps // stretch)
    rate = TIMED_RATE * run.resolved().optimizer.rate
    return replace(run, epochs=None, steps=total, rate=rate, log_every=stretch, evaluate_every=total)


def warming_steps(local_steps: int) -> int:
    """Steps before those that are timed: hooks begin, ranks connect, thresholds settle."""
    return 2 * LOCAL_STEPS if local_steps <= LOCAL_STEPS else local_steps


def by_local_steps(exchanges: Sequence[Exchange]) -> dict[int, list[Exchange]]:
    """Exchanges that are timed in stretches of the same length, by their local steps; few local steps are one group."""
    groups: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        groups.setdefault(exchange.local_steps if exchange.local_steps > LOCAL_STEPS else 1, []).append(exchange)
    return groups


def timed_exchange(exchange: Exchange) -> Exchange:
    """Without its dense start, which is dense's time, and at the rate of all: several may be timed as one."""
    return replace(exchange, dense_steps=0, rate=None)


@dataclass(frozen=True)
class StepTime:
    """Of one exchange on one network."""

    seconds: float
    dense_seconds: float  # of the steps before it begins
    dense_steps: int
    exchange_seconds: float
    interface_bytes: float | None
    raw_seconds: list[float]  # means of stretches

    def until(self, step: int) -> float:
        """Seconds of training until so many steps are done."""
        dense = min(step, self.dense_steps)
        return dense * self.dense_seconds + (step - dense) * self.seconds

    def applied(self, result: Row, tests: Sequence[Row]) -> tuple[Row, list[Row]]:
        """A run as it would have been on the network."""
        changed = {
            "step_seconds": self.seconds,
            "phase_seconds": {**result["phase_seconds"], "exchange": self.exchange_seconds},
            "interface_bytes_per_step": self.interface_bytes,
        }
        return {**result, **changed}, [{**row, "seconds": self.until(row["step"])} for row in tests]


def read_times(folder: Path, exchanges: Sequence[Exchange], dense: Exchange, seed: int, total: int) -> list[StepTime]:
    """From timed runs in the folder, for runs of so many steps by these exchanges, which may have a dense start."""
    stretches = {
        each: _stretches(folder / run_name(timed_exchange(each), seed), each.local_steps) for each in exchanges
    }
    dense_seconds = _median(stretches[dense], "step_seconds")
    return [
        StepTime(
            _median(rows, "step_seconds"),
            dense_seconds,
            exchange.num_dense_steps(total),
            _median(rows, "exchange_seconds"),
            _mean_interface_bytes(rows),
            [row["step_seconds"] for row in rows[1:]],
        )
        for exchange, rows in stretches.items()
    ]


def require_equal(network: str, results: Sequence[Row], other: str, others: Sequence[Row]) -> None:
    """That two networks came to the same parameters; or a loss is not what it would be on them."""
    for result, elsewhere in zip(results, others, strict=True):
        if result["digest"] != elsewhere["digest"]:
            raise MismatchError(f"{result['recipe']} came to other parameters on {network} than on {other}")


def _stretches(run: Path, local_steps: int) -> list[Row]:
    """Those that count, after the last one that warms up."""
    rows = [row for row in read_rows(run / METRICS) if row["event"] == "train"]
    return [row for row in rows if row["step"] >= warming_steps(local_steps)]


def _median(rows: Sequence[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows[1:]))


def _mean_interface_bytes(rows: Sequence[Row]) -> float | None:
    first, last = rows[0], rows[-1]
    if last["interface_bytes"] is None:
        return None
    return float((last["interface_bytes"] - first["interface_bytes"]) / (last["step"] - first["step"]))
