"""The best three run for real: the same training steps as predicted, at full size, with computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradsieve.lab.tune.job import Job, Work, model_work, stand_in_work
from gradsieve.lab.tune.method import Method
from gradsieve.lab.tune.predict import Model
from gradsieve.lab.tune.training import timed_steps

CHECKED = 3
WARMUP_STEPS, TIMED_STEPS = 20, 11
TORCH_WARMUP_STEPS = 4

Tell = Callable[[str, int, int], None]


class Checked(NamedTuple):
    """A prediction beside what was measured."""

    method: Method
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Relative to what was measured; negative if the step took longer than predicted."""
        return self.predicted_seconds / self.measured_seconds - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "error": self.error,
        }


def check(
    model: Model, job: Job, best: Sequence[Method], model_name: str | None, rank: int, tell: Tell
) -> list[Checked]:
    """All ranks call it together. A user's model is built again for each method."""
    found = []
    for number, method in enumerate(best):
        tell("check", number, len(best))
        work = _work(job, model_name, rank)
        warmup = TORCH_WARMUP_STEPS if method.is_baseline else WARMUP_STEPS
        measured, _ = timed_steps(method, work, warmup, TIMED_STEPS)
        found.append(Checked(method, model.step_seconds(method, job), measured))
    tell("check", len(best), len(best))
    return found


def _work(job: Job, model_name: str | None, rank: int) -> Work:
    return stand_in_work(job.numel, job.compute_seconds, rank) if model_name is None else model_work(model_name)
