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

WARMING_STEPS = 2 * LOCAL_STEPS  # hooks begin, ranks connect, thresholds settle
TIMED_RATE = 0.01  # of the run's: a schedule of a few steps warms up so quickly that runs would go astray


def timed_plan(run: Plan, steps: int) -> Plan:
    """So many steps after some that warm up, in stretches that hold one averaging of local SGD each."""
    total = WARMING_STEPS + LOCAL_STEPS * -(-steps // LOCAL_STEPS)
    rate = TIMED_RATE * run.resolved().optimizer.rate
    return replace(run, epochs=None, steps=total, rate=rate, log_every=LOCAL_STEPS, evaluate_every=total)


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
    stretches = {each: _stretches(folder / run_name(timed_exchange(each), seed)) for each in exchanges}
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


def _stretches(run: Path) -> list[Row]:
    """Those that count, after the last one that warms up."""
    rows = [row for row in read_rows(run / METRICS) if row["event"] == "train"]
    return [row for row in rows if row["step"] >= WARMING_STEPS]


def _median(rows: Sequence[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows[1:]))


def _mean_interface_bytes(rows: Sequence[Row]) -> float | None:
    first, last = rows[0], rows[-1]
    if last["interface_bytes"] is None:
        return None
    return float((last["interface_bytes"] - first["interface_bytes"]) / (last["step"] - first["step"]))
