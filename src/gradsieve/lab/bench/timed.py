"""Step times measured on a network, for loss curves that were trained over loopback.

A plan ends with the same parameters, bit for bit, on every network. So only the time per step has to be measured on a
slow network, and a few steps are enough. They are the same on every network, and it is checked that they end with the
same parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradsieve.errors import MismatchError
from gradsieve.lab.baselines import LOCAL_STEPS
from gradsieve.lab.bench.report import Row
from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.comparison import run_name
from gradsieve.lab.train.journal import METRICS, read_rows
from gradsieve.lab.train.plan import Plan

TIMED_RATE = 0.01  # factor on the learning rate: the warm-up of a few steps is so short that runs would diverge


def timed_plan(run: Plan, steps: int, local_steps: int = 1) -> Plan:
    """At least `steps` steps after a warm-up, in intervals that contain one exchange of `local_steps` each."""
    interval = max(LOCAL_STEPS, local_steps)
    total = warmup_steps(local_steps) + interval * -(-steps // interval)
    rate = TIMED_RATE * run.resolved().optimizer.rate
    return replace(run, epochs=None, steps=total, rate=rate, log_every=interval, evaluate_every=total)


def warmup_steps(local_steps: int) -> int:
    """Untimed steps at the start: hooks start to compress, ranks connect, thresholds become stable."""
    return 2 * LOCAL_STEPS if local_steps <= LOCAL_STEPS else local_steps


def by_local_steps(choices: Sequence[Choice]) -> dict[int, list[Choice]]:
    """Choices by the length of their intervals. All with at most `LOCAL_STEPS` local steps are under 1."""
    groups: dict[int, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.local_steps if choice.local_steps > LOCAL_STEPS else 1, []).append(choice)
    return groups


def timed_choice(choice: Choice) -> Choice:
    """The choice without its dense start, whose steps take as long as dense's, and without its own learning rate.

    Choices that differ only in these have the same step time and are timed once.
    """
    return replace(choice, dense_steps=0, rate=None)


@dataclass(frozen=True)
class StepTime:
    """Step times of one choice on one network."""

    seconds: float
    dense_seconds: float  # per step of the dense start
    dense_steps: int
    exchange_seconds: float
    interface_bytes: float | None
    raw_seconds: list[float]  # mean seconds per step of each interval

    def until(self, step: int) -> float:
        """Seconds of training for the first `step` steps."""
        dense = min(step, self.dense_steps)
        return dense * self.dense_seconds + (step - dense) * self.seconds

    def applied(self, result: Row, tests: Sequence[Row]) -> tuple[Row, list[Row]]:
        """Result and tests of a run, with the times it would have had on this network."""
        changed = {
            "step_seconds": self.seconds,
            "phase_seconds": {**result["phase_seconds"], "exchange": self.exchange_seconds},
            "interface_bytes_per_step": self.interface_bytes,
        }
        return {**result, **changed}, [{**row, "seconds": self.until(row["step"])} for row in tests]


def read_times(folder: Path, choices: Sequence[Choice], dense: Choice, seed: int, total: int) -> list[StepTime]:
    """Step times from the timed runs in the folder, for runs of `total` steps, which may have a dense start."""
    intervals = {
        choice: _intervals(folder / run_name(timed_choice(choice), seed), choice.local_steps) for choice in choices
    }
    dense_seconds = _median(intervals[dense], "step_seconds")
    return [
        StepTime(
            _median(rows, "step_seconds"),
            dense_seconds,
            choice.num_dense_steps(total),
            _median(rows, "exchange_seconds"),
            _mean_interface_bytes(rows),
            [row["step_seconds"] for row in rows[1:]],
        )
        for choice, rows in intervals.items()
    ]


def require_equal(network: str, results: Sequence[Row], other: str, others: Sequence[Row]) -> None:
    """Raise an error if two networks ended with different parameters: then the loss depends on the network."""
    for result, elsewhere in zip(results, others, strict=True):
        if result["digest"] != elsewhere["digest"]:
            raise MismatchError(f"{result['recipe']} ended with different parameters on {network} and on {other}")


def _intervals(run: Path, local_steps: int) -> list[Row]:
    """Rows of the timed intervals, and of the last interval of the warm-up before them."""
    rows = [row for row in read_rows(run / METRICS) if row["event"] == "train"]
    return [row for row in rows if row["step"] >= warmup_steps(local_steps)]


def _median(rows: Sequence[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows[1:]))


def _mean_interface_bytes(rows: Sequence[Row]) -> float | None:
    first, last = rows[0], rows[-1]
    if last["interface_bytes"] is None:
        return None
    return float((last["interface_bytes"] - first["interface_bytes"]) / (last["step"] - first["step"]))
