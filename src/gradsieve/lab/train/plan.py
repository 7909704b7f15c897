"""The plan of a run: workload, choice, length, periods of tests and checkpoints. Plain values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.train.choice import Choice, parse_choices
from gradsieve.lab.workloads import WORKLOADS, Limits, Preset, Task

ROWS = 100  # default number of rows of training metrics per run
TESTS = 15  # default number of tests per run
CHOICE_KEY = "exchange"  # of the choice in config.json and summary.json


@dataclass(frozen=True)
class Plan:
    """All settings of one run, except where it runs."""

    workload: str
    choice: Choice
    preset: str = "default"
    source: str | None = None  # data source; None is the preset's
    data: str | None = None  # folder with the user's data
    epochs: float | None = None  # None is the preset's
    steps: int | None = None  # instead of epochs
    batch: int | None = None  # samples per rank and step
    rate: float | None = None  # base learning rate
    seed: int = 0
    evaluate: str = "test"  # part of the data that is scored: test, or validation if the workload has one
    train_samples: int | None = None  # use only the first ones; None is all
    test_samples: int | None = None
    log_every: int | None = None  # steps between rows of metrics; more is cheaper
    evaluate_every: int | None = None
    checkpoint_every: int | None = None  # None is never
    probe_every: int | None = None  # None is never

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InputError("epochs and steps exclude each other: give one of them")
        for name in (
            "epochs", "steps", "batch", "rate", "train_samples", "test_samples", "log_every", "evaluate_every",
            "checkpoint_every", "probe_every",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name.replace('_', ' ')} must be positive, got {value}")
        if self.checkpoint_every is not None and self.choice.ddp_baseline not in (None, BASELINES["ddp"]):
            raise InputError(f"{self.choice.recipe} keeps a state that cannot be saved: leave out --checkpoint-every")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")
        self.choice.optimizer(self.resolved())  # an error if the workload's optimizer has no such variant
        object.__setattr__(self, "choice", self.choice.coded(self.resolved()))

    def choices(self, names: Sequence[str], codes: Sequence[str]) -> list[Choice]:
        """Every name with every value code (`parse_choices`), each once; an error if one does not fit this run."""
        return self.checked(parse_choices(self.choice, names, codes))

    def checked(self, choices: Iterable[Choice]) -> list[Choice]:
        """The choices, each once with its value code; an error if one does not fit this run."""
        return list(dict.fromkeys(replace(self, choice=choice).choice for choice in choices))

    def resolved(self) -> Preset:
        """The preset with this plan's settings."""
        workload = WORKLOADS[self.workload]
        changes: dict[str, Any] = {}
        if self.batch is not None:
            changes["batch"] = self.batch
        if self.epochs is not None:
            changes["epochs"] = self.epochs
        preset = workload.preset(self.preset, self.source, self.evaluate, **changes)
        return preset if self.rate is None else replace(preset, optimizer=preset.optimizer.at(self.rate))

    def open(self) -> Task[Any]:
        """The task, with its data read."""
        limits = Limits(self.train_samples, self.test_samples)
        return WORKLOADS[self.workload].open(self.resolved(), Path(self.data) if self.data else None, limits)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in steps."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.resolved().epochs * steps_per_epoch - 1e-9))

    def pace(self, total_steps: int) -> Pace:
        """The steps at which metrics, tests and checkpoints are due."""
        return Pace(
            total_steps,
            self.log_every or max(1, total_steps // ROWS),
            self.evaluate_every or max(1, total_steps // TESTS),
            self.checkpoint_every,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for config.json."""
        return {CHOICE_KEY if name == "choice" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """The plan of `to_json`. Fields that the file does not have keep their default."""
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**kept, choice=Choice(**values[CHOICE_KEY]))


@dataclass(frozen=True)
class Pace:
    """Periods in steps: what is due besides training, and when."""

    total: int
    log: int
    evaluate: int
    checkpoint: int | None

    def next_stop(self, step: int) -> int:
        """The next step after this one at which something is due."""
        periods = [every for every in (self.log, self.evaluate, self.checkpoint) if every]
        return min(self.total, *((step // every + 1) * every for every in periods))

    def tests_at(self, step: int) -> bool:
        """Whether a test is due after this step."""
        return step % self.evaluate == 0 or step == self.total

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return self.checkpoint is not None and (step % self.checkpoint == 0 or step == self.total)
