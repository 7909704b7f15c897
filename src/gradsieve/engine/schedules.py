"""How many entries to send as training goes on: early gradients change fast, and too early sparsity hurts for good."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from gradsieve.errors import InputError


class Schedule(ABC):
    """A density for every step. Frozen and printable: ranks compare what it prints, so it says all it does."""

    dense_steps: int

    def density_at(self, step: int) -> float | None:
        """The density of a step, counted from 0; None for a dense one."""
        return None if step < self.dense_steps else self.sparse_density_at(step - self.dense_steps)

    @abstractmethod
    def sparse_density_at(self, step: int) -> float:
        """The density of a step, counted from the end of the dense ones."""


@dataclass(frozen=True)
class Constant(Schedule):
    """One density throughout."""

    density: float
    dense_steps: int = 0  # steps at the start that send everything; more is safer, and slower

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
    """A list of densities, each for `every` steps, the last for good; as DGC's 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %."""

    densities: tuple[float, ...]
    every: int  # steps from one density to the next; the papers use an epoch
    dense_steps: int = 0  # steps at the start that send everything; more is safer, and slower

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
    """From `start` down (or up) to `end` by the same factor every step, then `end` for good."""

    start: float
    end: float
    steps: int  # how long the way takes; more is gentler, and sends more
    dense_steps: int = 0  # steps at the start that send everything; more is safer, and slower

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
    """A plain number is that density throughout."""
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
