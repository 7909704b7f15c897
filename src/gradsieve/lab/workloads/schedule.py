"""Learning rate schedules: functions from the completed share of a run to a factor of the base learning rate.

They depend on nothing else, so there is no state to save, and a shorter run has a schedule of the same shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from typing_extensions import override

from gradsieve.errors import InputError


class RateSchedule(Protocol):
    """A learning rate schedule."""

    def factor(self, share: float) -> float:
        """The factor of the base learning rate, for a share between 0, the start, and 1, the end."""
        ...


@dataclass(frozen=True)
class Steps(RateSchedule):
    """Linear warm-up from zero, then a drop by a factor at each milestone."""

    warmup: float = 0.0  # share of the run; longer is gentler
    milestones: tuple[float, ...] = ()  # shares of the run
    drop: float = 0.1

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)
        for milestone in self.milestones:
            _require_share("a milestone", milestone)

    @override
    def factor(self, share: float) -> float:
        passed = sum(share >= milestone for milestone in self.milestones)
        return _warmed_up(share, self.warmup) * self.drop**passed


@dataclass(frozen=True)
class Linear(RateSchedule):
    """Linear warm-up from zero, then linear decay to zero."""

    warmup: float = 0.1

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)

    @override
    def factor(self, share: float) -> float:
        falling = (1 - share) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return max(0.0, min(_warmed_up(share, self.warmup), falling))


@dataclass(frozen=True)
class Cosine(RateSchedule):
    """Linear warm-up from zero, then half a cosine down to the final factor."""

    warmup: float = 0.05
    final: float = 0.0  # factor at the end

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)
        if not 0 <= self.final <= 1:
            raise InputError(f"final must be a factor of the base learning rate, from 0 to 1, got {self.final}")

    @override
    def factor(self, share: float) -> float:
        if share < self.warmup:
            return _warmed_up(share, self.warmup)
        done = min(1.0, (share - self.warmup) / max(1e-9, 1 - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Exponential(RateSchedule):
    """Constant for a while, then exponential decay."""

    hold: float = 0.0  # share of the run before the decay
    final: float = 0.01  # factor at the end

    def __post_init__(self) -> None:
        _require_share("hold", self.hold)

    @override
    def factor(self, share: float) -> float:
        done = max(0.0, (share - self.hold) / max(1e-9, 1 - self.hold))
        return float(self.final ** min(1.0, done))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _warmed_up(share: float, warmup: float) -> float:
    return min(1.0, share / warmup) if warmup > 0 else 1.0


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must be a share of the run, from 0 to 1, got {value}")
