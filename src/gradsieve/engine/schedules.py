"""Density over the course of training. Early gradients change fast, and too early sparsity hurts for good."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from gradsieve.errors import InputError


class Schedule(ABC):
    """A density for every step. Its text must contain all settings, since ranks compare schedules by their text."""

    dense_steps: int

    def density_at(self, step: int) -> float | None:
        """Return the density of a step, counted from 0; None if it is dense."""
        return None if step < self.dense_steps else self.sparse_density_at(step - self.dense_steps)

    @abstractmethod
    def sparse_density_at(self, step: int) -> float:
        """Return the density of a step, counted from the end of the dense steps."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same density at every step.

    Args:
        density: Fraction of the entries to send per step, in (0, 1].
        dense_steps: Steps at the start that send all entries. More is safer, and slower.

    Raises:
        InputError: A value is outside its range.

    Example:
        >>> from gradsieve import Constant
        >>> Constant(0.01, dense_steps=100).density_at(100)
        0.01
    """

    density: float
    dense_steps: int = 0

    def __post_init__(self) -> None:
        _check_density(self.density)
        _check_steps("dense_steps", self.dense_steps, 0)

    def __str__(self) -> str:
        return repr(self) if self.dense_steps else f"{self.density:g}"

    @override
    def sparse_density_at(self, step: int) -> float:
        return self.density


@dataclass(frozen=True)
class Steps(Schedule):
    """Several densities, each for the same number of steps, as in DGC: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %.

    Args:
        densities: The densities in order. The last one stays.
        every: Steps per density. The papers use an epoch.
        dense_steps: Steps at the start that send all entries. More is safer, and slower.

    Raises:
        InputError: A value is outside its range, or there is no density.

    Example:
        >>> from gradsieve import Steps
        >>> warm_up = Steps((0.25, 0.0625, 0.01), every=100)
        >>> [warm_up.density_at(step) for step in (0, 100, 1000)]
        [0.25, 0.0625, 0.01]
    """

    densities: tuple[float, ...]
    every: int
    dense_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "densities", tuple(self.densities))
        if not self.densities:
            raise InputError("densities must have at least one entry, got none")
        for density in self.densities:
            _check_density(density)
        _check_steps("every", self.every, 1)
        _check_steps("dense_steps", self.dense_steps, 0)

    @override
    def sparse_density_at(self, step: int) -> float:
        return self.densities[min(step // self.every, len(self.densities) - 1)]


@dataclass(frozen=True)
class Exponential(Schedule):
    """A density that changes from `start` to `end` by the same factor at every step, and then stays.

    Args:
        start: The density of the first sparse step.
        end: The density after `steps` steps.
        steps: Steps from `start` to `end`. More is gentler, and sends more.
        dense_steps: Steps at the start that send all entries. More is safer, and slower.

    Raises:
        InputError: A value is outside its range.

    Example:
        >>> from gradsieve import Exponential
        >>> Exponential(start=0.25, end=0.01, steps=1000).density_at(500)
        0.05
    """

    start: float
    end: float
    steps: int
    dense_steps: int = 0

    def __post_init__(self) -> None:
        _check_density(self.start)
        _check_density(self.end)
        _check_steps("steps", self.steps, 1)
        _check_steps("dense_steps", self.dense_steps, 0)

    @override
    def sparse_density_at(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        return float(self.start * (self.end / self.start) ** (step / self.steps))


def as_schedule(density: float | Schedule) -> Schedule:
    """Return a number as the schedule with that density at every step."""
    if isinstance(density, Schedule):
        return density
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise InputError(f"density must be a number in (0, 1] or a schedule, got {density!r}")
    return Constant(float(density))


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise InputError(f"density must be in (0, 1], got {density}")


def _check_steps(name: str, steps: int, least: int) -> None:
    if steps < least:
        raise InputError(f"{name} must be at least {least}, got {steps}")
