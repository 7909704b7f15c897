"""Several choices on the same workload, data and seeds, in the same rank processes.

For each seed all runs take turns, some steps each, so that other load on the machine affects all of them alike
(`all_in_turn`). Each run ends with the same parameters as it would alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.journal import METRICS, Row, read_rows
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.train.run import Run, Tell, rehearse

Turns = Callable[[Sequence[Run]], Sequence[Run]]
"""From the runs that have not ended, those that train next, until something is due. The same on all ranks."""


def all_in_turn(going: Sequence[Run]) -> Sequence[Run]:
    """Every run, so that all of them are at the same step."""
    return going


def least_time_first(going: Sequence[Run]) -> Sequence[Run]:
    """The run that has trained for the shortest time, so that all are at the same time, and the fastest ends first."""
    return [min(going, key=lambda run: run.totals.seconds)]


def run_name(choice: Choice, seed: int) -> str:
    """The name of a run's folder inside the folder of the comparison."""
    return f"{choice.label.replace(' ', '-')}-seed{seed}"


def compare_everywhere(
    tell: Tell,
    device: str,
    folder: Path,
    plan: Plan,
    choices: Sequence[Choice],
    seeds: Sequence[int],
    in_network: bool = False,
    turns: Turns = all_in_turn,
) -> list[Row]:
    """All runs on this rank of an initialized process group. `launch` starts it on all ranks."""
    task = plan.open()
    for choice in choices:
        rehearse(replace(plan, choice=choice), task, device)
    results: list[Row] = []
    for seed in seeds:
        runs = []
        for choice in choices:
            own = folder / run_name(choice, seed)
            own.mkdir(parents=True, exist_ok=True)
            runs.append(Run(replace(plan, choice=choice, seed=seed), task, own, tell, device, in_network))
        for run in runs:
            run.begin()
        while going := [run for run in runs if not run.done]:
            for run in turns(going):
                run.advance()
        results += [run.end() for run in runs]
    return results


@dataclass(frozen=True)
class Curves:
    """The rows of one choice with one kind of event, by seed."""

    label: str
    seeds: list[list[Row]]

    def at(self, name: str) -> list[list[float]]:
        """The values of a field: one list per row, with one value per seed. Rows that a seed lacks are left out."""
        length = min(len(rows) for rows in self.seeds)
        kept: list[list[Any]] = [[rows[number].get(name) for rows in self.seeds] for number in range(length)]
        return [[float(value) for value in values] for values in kept if None not in values]

    def means(self, name: str) -> list[float]:
        """The mean of a field over the seeds, per row."""
        return [statistics.fmean(values) for values in self.at(name)]


def read_curves(folder: Path, choices: Sequence[Choice], seeds: Sequence[int], event: str) -> list[Curves]:
    """The curves of all choices, from the folders of their runs."""
    found = []
    for choice in choices:
        rows = [read_rows(folder / run_name(choice, seed) / METRICS) for seed in seeds]
        found.append(Curves(choice.label, [[row for row in of if row["event"] == event] for of in rows]))
    return found


def summary(results: Sequence[Row]) -> dict[str, Row]:
    """Mean and standard deviation over seeds of every figure, by the choice's label."""
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
    """Mean and deviation without missing values and NaN."""
    known = [float(value) for value in values if value is not None and value == value]
    if not known:
        return {"mean": None, "deviation": None, "values": []}
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return {"mean": statistics.fmean(known), "deviation": deviation, "values": known}
