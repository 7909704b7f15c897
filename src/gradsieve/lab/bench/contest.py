"""Several methods timed side by side: each round every method takes one step, so that noise hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from gradsieve.lab.bench.gradients import Gradients

T = TypeVar("T", covariant=True)

Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many steps are done, and how many there will be."""

RESIDUAL_WARMUP_STEPS = 48
"""A residual that starts at zero grows fast at first, and thresholds with it; from here on they can be reused."""


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


class Contender(Protocol[T]):
    """A method under test; it keeps its own state from step to step and measures itself."""

    warmup_steps: int

    def step(self, grad: Tensor) -> T:
        """One step with a new gradient, which is not changed."""
        ...


def contest(
    what: str,
    contenders: Mapping[str, Contender[T]],
    gradients: Gradients,
    repeats: int,
    progress: Progress = silent,
) -> dict[str, list[T]]:
    """What every step of every contender measured, after its warm-up."""
    warmup = max(contender.warmup_steps for contender in contenders.values())
    measured: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(warmup + repeats):
        grad = gradients.fresh()
        for name, contender in contenders.items():
            if number < warmup - contender.warmup_steps:
                continue
            sample = contender.step(grad)
            if number >= warmup:
                measured[name].append(sample)
        progress(what, number + 1, warmup + repeats)
    return measured
