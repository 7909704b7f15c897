"""Several methods timed in turns: in every round each method takes one step, so that noise affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from gradsieve.lab.bench.gradients import Gradients

T = TypeVar("T", covariant=True)

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, the number of steps done, and the total number of steps."""

RESIDUAL_WARMUP_STEPS = 48
"""A residual starts at zero and grows fast at first, and thresholds with it. After this many steps they are stable."""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that ignores every call."""


class Contender(Protocol[T]):
    """A method under test. It keeps its state between steps and measures itself."""

    warmup_steps: int

    def step(self, grad: Tensor) -> T:
        """Take one step with a new gradient, which must not be changed, and return the measurement."""
        ...


def contest(
    what: str,
    contenders: Mapping[str, Contender[T]],
    gradients: Gradients,
    repeats: int,
    progress: Progress = silent,
) -> dict[str, list[T]]:
    """The measurements of all steps after the warm-up, by contender."""
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
