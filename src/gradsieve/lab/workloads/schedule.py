"""How the learning rate moves over a run: the share of the run that is done in, a factor of the base rate out.

Being functions of the share alone, schedules have no state to save, and a shorter run keeps their shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer

from gradsieve.errors import InputError


class RateSchedule(Protocol):
    """From 0, the start, to 1, the end."""

    def factor(self, share: float) -> float:
        """Of the base rate."""


@dataclass(frozen=True)
class Steps:
    """Up from nothing while warming up, then down by a factor at each milestone."""

    warmup: float = 0.0  # share of the run; more is gentler
    milestones: tuple[float, ...] = ()  # shares of the run
    drop: float = 0.1

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)
        for milestone in self.milestones:
            _require_share("a milestone", milestone)

    def factor(self, share: float) -> float:
        """Of the base rate."""
        passed = sum(share >= milestone for milestone in self.milestones)
        return _warming(share, self.warmup) * self.drop**passed


@dataclass(frozen=True)
class Linear:
    """Up from nothing while warming up, then in a straight line to nothing."""

    warmup: float = 0.1

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)

    def factor(self, share: float) -> float:
        """Of the base rate."""
        falling = (1 - share) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return max(0.0, min(_warming(share, self.warmup), falling))


@dataclass(frozen=True)
class Cosine:
    """Up from nothing while warming up, then along half a cosine to the final factor."""

    warmup: float = 0.05
    final: float = 0.0  # factor of the base rate at the end

    def __post_init__(self) -> None:
        _require_share("warmup", self.warmup)
        if not 0 <= self.final <= 1:
            raise InputError(f"final must be a factor of the base rate, from 0 to 1, got {self.final}")

    def factor(self, share: float) -> float:
        """Of the base rate."""
        if share < self.warmup:
            return _warming(share, self.warmup)
        done = min(1.0, (share - self.warmup) / max(1e-9, 1 - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Exponential:
    """The base rate for a while, then down by the same factor in equal times."""

    hold: float = 0.0  # share of the run before it falls
    final: float = 0.01  # factor at the end

    def __post_init__(self) -> None:
        _require_share("hold", self.hold)

    def factor(self, share: float) -> float:
        """Of the base rate."""
        done = max(0.0, (share - self.hold) / max(1e-9, 1 - self.hold))
        return float(self.final ** min(1.0, done))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The same in all groups of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _warming(share: float, warmup: float) -> float:
    return min(1.0, share / warmup) if warmup > 0 else 1.0


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must be a share of the run, from 0 to 1, got {value}")
