"""What is asked for: a workload, an exchange, how long, how often to look. Plain values, to be resumed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.peers import PEERS
from gradsieve.lab.train.exchange import Exchange
from gradsieve.lab.workloads import WORKLOADS, Limits, Preset, Task

ROWS = 100  # of training metrics in a run, unless asked for otherwise
TESTS = 15


@dataclass(frozen=True)
class Plan:
    """One run, but for where it runs."""

    workload: str
    exchange: Exchange
    preset: str = "default"
    source: str | None = None  # of data; None is the preset's
    data: str | None = None  # folder of the user's data
    epochs: float | None = None  # None is the preset's
    steps: int | None = None  # instead of epochs
    batch: int | None = None  # samples a worker and step
    rate: float | None = None  # base learning rate
    seed: int = 0
    evaluate: str = "test"  # the part of the data that is scored: test, or validation where the workload has one
    train_samples: int | None = None  # the first so many; None is all
    test_samples: int | None = None
    log_every: int | None = None  # steps; more is cheaper, fewer shows more
    evaluate_every: int | None = None
    checkpoint_every: int | None = None  # None never
    probe_every: int | None = None  # None never

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
        if self.checkpoint_every is not None and self.exchange.peer not in (None, PEERS["ddp"]):
            raise InputError(f"{self.exchange.recipe} keeps a state that cannot be saved: it runs without checkpoints")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")
        self.exchange.optimizer(self.resolved())

    def check_with(self, exchanges: Iterable[Exchange]) -> None:
        """That the same run can be made with each of them: what does not fit is an error here, not in a worker."""
        for exchange in exchanges:
            replace(self, exchange=exchange)

    def resolved(self) -> Preset:
        """The preset with what was asked for put in."""
        workload = WORKLOADS[self.workload]
        changes: dict[str, Any] = {}
        if self.batch is not None:
            changes["batch"] = self.batch
        if self.epochs is not None:
            changes["epochs"] = self.epochs
        preset = workload.preset(self.preset, self.source, self.evaluate, **changes)
        return preset if self.rate is None else replace(preset, optimizer=preset.optimizer.at(self.rate))

    def open(self) -> Task[Any]:
        """The task with its data."""
        limits = Limits(self.train_samples, self.test_samples)
        return WORKLOADS[self.workload].open(self.resolved(), Path(self.data) if self.data else None, limits)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Of the whole run."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.resolved().epochs * steps_per_epoch - 1e-9))

    def pace(self, total_steps: int) -> Pace:
        """When to look and to save."""
        return Pace(
            total_steps,
            self.log_every or max(1, total_steps // ROWS),
            self.evaluate_every or max(1, total_steps // TESTS),
            self.checkpoint_every,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """What `to_json` gave; what a later version has added keeps its default."""
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, "exchange": Exchange(**values["exchange"])})


@dataclass(frozen=True)
class Pace:
    """At which steps something is done besides training."""

    total: int
    log: int
    evaluate: int
    checkpoint: int | None

    def next_stop(self, step: int) -> int:
        """The next step, after this one, at which something is."""
        periods = [every for every in (self.log, self.evaluate, self.checkpoint) if every]
        return min(self.total, *((step // every + 1) * every for every in periods))

    def tests_at(self, step: int) -> bool:
        """Whether the test data is scored after this step."""
        return step % self.evaluate == 0 or step == self.total

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        return self.checkpoint is not None and (step % self.checkpoint == 0 or step == self.total)
