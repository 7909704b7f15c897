"""Several exchanges on the same workload, data and seeds, on the same workers.

For each seed all runs go forward in turn, a stretch of steps each, so that they meet the same conditions: what else the
machine does falls on all of them alike. Each trains as if alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradsieve.lab.train.course import Course, Tell, rehearse
from gradsieve.lab.train.exchange import Exchange
from gradsieve.lab.train.journal import METRICS, Row, read_rows
from gradsieve.lab.train.plan import Plan


def run_name(exchange: Exchange, seed: int) -> str:
    """Of a run's folder within the comparison's."""
    return f"{exchange.label.replace(' ', '-')}-seed{seed}"


def compare_everywhere(
    tell: Tell,
    device: str,
    folder: Path,
    plan: Plan,
    exchanges: Sequence[Exchange],
    seeds: Sequence[int],
    in_network: bool = False,
) -> list[Row]:
    """All runs, on this rank of an initialized world; what `launch` starts on all ranks."""
    task = plan.open()
    for exchange in exchanges:
        rehearse(replace(plan, exchange=exchange), task, device)
    results: list[Row] = []
    for seed in seeds:
        courses = []
        for exchange in exchanges:
            own = folder / run_name(exchange, seed)
            own.mkdir(parents=True, exist_ok=True)
            courses.append(Course(replace(plan, exchange=exchange, seed=seed), task, own, tell, device, in_network))
        for course in courses:
            course.begin()
        while going := [course for course in courses if not course.done]:
            for course in going:
                course.advance()
        results += [course.end() for course in courses]
    return results


@dataclass(frozen=True)
class Curves:
    """One exchange over all seeds: its rows of one event, as many as all seeds have."""

    label: str
    seeds: list[list[Row]]

    def at(self, name: str) -> list[list[float]]:
        """A field of each row, for all seeds."""
        length = min(len(rows) for rows in self.seeds)
        kept: list[list[Any]] = [[rows[number].get(name) for rows in self.seeds] for number in range(length)]
        return [[float(value) for value in values] for values in kept if None not in values]

    def means(self, name: str) -> list[float]:
        """Over the seeds."""
        return [statistics.fmean(values) for values in self.at(name)]


def read_curves(folder: Path, exchanges: Sequence[Exchange], seeds: Sequence[int], event: str) -> list[Curves]:
    """From the folders of the runs."""
    found = []
    for exchange in exchanges:
        rows = [read_rows(folder / run_name(exchange, seed) / METRICS) for seed in seeds]
        found.append(Curves(exchange.label, [[row for row in of if row["event"] == event] for of in rows]))
    return found


def summary(results: Sequence[Row]) -> dict[str, Row]:
    """Mean and spread over seeds of every figure, by exchange."""
    labels = list(dict.fromkeys(result["recipe"] for result in results))
    return {label: _joined([result for result in results if result["recipe"] == label]) for label in labels}


def _joined(results: Sequence[Row]) -> Row:
    scores = {name for result in results for name in result["scores"]}
    return {
        "seeds": [result["seed"] for result in results],
        "diverged": sum(result["diverged"] for result in results),
        "replicas_equal": all(result["replicas_equal"] for result in results),
        "train_loss": _spread([result["train_loss"] for result in results]),
        "scores": {name: _spread([result["scores"].get(name) for result in results]) for name in sorted(scores)},
        "step_seconds": _spread([result["step_seconds"] for result in results]),
        "exchange_seconds": _spread([result["phase_seconds"]["exchange"] for result in results]),
        "bytes_received_per_step": _spread([result["bytes_received_per_step"] for result in results]),
    }


def _spread(values: Sequence[Any]) -> Row:
    """Of runs that came to something."""
    known = [float(value) for value in values if value is not None and value == value]
    if not known:
        return {"mean": None, "deviation": None, "values": []}
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return {"mean": statistics.fmean(known), "deviation": deviation, "values": known}
