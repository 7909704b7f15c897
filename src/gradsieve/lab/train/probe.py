"""The quantities that the papers plot, measured in some steps of a training run.

- xi of Ok-Topk's assumption: |Topk(mean accumulated) - total / P| over |mean gradient|. The means are taken by separate
  all_reduce calls, which are part of neither the traffic counts nor the phase times.
- contraction: the share of |accumulated|² that is not sent, for the exact k largest entries and for the selected ones,
  with the bounds 1 - k/n and (1 - k/n)².
- counts: entries selected and delivered, and k.
- a histogram of the largest group's accumulated gradient, with the exact threshold, the used one, and a Gaussian one.

A recipe is probed by wrapping its three parts. The wrapped recipe behaves and prints like the original.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.feedback.base import Accumulated, WrappedFeedback
from gradsieve.kernels import Entries
from gradsieve.lab.train.sample import Sample, take_sample
from gradsieve.recipes import Recipe
from gradsieve.reducers.protocol import Reduced, WrappedReducer
from gradsieve.selectors.protocol import WrappedSelector
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


@dataclass
class Probe:
    """Collects samples during a step and turns them into rows."""

    step: int = 0
    wanted: bool = False
    samples: list[Sample] = field(default_factory=list)  # of the current step
    rows: list[dict[str, Any]] = field(default_factory=list)
    grad: Tensor | None = None
    accumulated: Tensor | None = None
    comm: Comm | None = None  # the one the recipe reduces over

    def begin(self, step: int, wanted: bool) -> None:
        """Call it before each step; `wanted` says whether to probe the step."""
        self._finish()
        self.step, self.wanted = step, wanted

    def taken(self) -> list[dict[str, Any]]:
        """One row per step that was probed since the last call. Dense steps have none."""
        self._finish()
        rows, self.rows = self.rows, []
        return rows

    def _finish(self) -> None:
        samples, self.samples = self.samples, []
        if samples:
            self.rows.append(self._row(samples))

    def _row(self, samples: list[Sample]) -> dict[str, Any]:
        numel, k = sum(s.numel for s in samples), sum(s.k for s in samples)
        accumulated = sum(s.accumulated for s in samples) or math.nan
        gradient = sum(s.gradient for s in samples) or math.nan
        return {
            "step": self.step + 1,
            "numel": numel,
            "k": k,
            "selected": sum(s.selected for s in samples),
            "delivered": sum(s.delivered for s in samples),
            "xi": math.sqrt(sum(s.deviation for s in samples) / gradient),
            "contraction_exact": sum(s.left_exact for s in samples) / accumulated,
            "contraction": sum(s.left for s in samples) / accumulated,
            "bound": 1 - k / numel,
            "bound_bell_shaped": (1 - k / numel) ** 2,
            "histogram": max(samples, key=lambda s: s.numel).histogram,
        }


def probed(recipe: Recipe, probe: Probe) -> Recipe:
    """The same recipe, with its parts wrapped."""
    return replace(
        recipe,
        selector=ProbedSelector(recipe.selector, probe),
        reducer=ProbedReducer(recipe.reducer, probe),
        feedback=ProbedFeedback(recipe.feedback, probe),
    )


@dataclass(frozen=True, repr=False)
class ProbedFeedback(WrappedFeedback):
    """Records the gradient."""

    probe: Probe

    @override
    def accumulate(self, grad: Pieces, out: Pieces, state: Any, floor: float | None, expected: int) -> Accumulated:
        if self.probe.wanted and self.probe.comm is not None:
            with self.probe.comm.aside():
                self.probe.grad = grad.copied_to(torch.empty(grad.numel, device=grad.device))
        return super().accumulate(grad, out, state, floor, expected)


@dataclass(frozen=True, repr=False)
class ProbedSelector(WrappedSelector):
    """Records the accumulated gradient."""

    probe: Probe

    @override
    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Entries | None) -> tuple[SparseVector, Any]:
        self.probe.accumulated = accumulated if self.probe.wanted else None
        return super().select(accumulated, k, state, candidates)


@dataclass(frozen=True, repr=False)
class ProbedReducer(WrappedReducer):
    """Takes the sample after the reduction."""

    probe: Probe

    @override
    def start(self, numel: int, comm: Comm) -> Any:
        self.probe.comm = comm
        return super().start(numel, comm)

    @override
    def reduce(self, local: SparseVector, k: int, state: Any, comm: Comm) -> tuple[Reduced, Any]:
        reduced, after = super().reduce(local, k, state, comm)
        probe = self.probe
        if probe.wanted and probe.grad is not None and probe.accumulated is not None:
            with comm.aside() as beside:
                probe.samples.append(take_sample(probe.grad, probe.accumulated, local, reduced.total, k, beside))
            probe.grad = probe.accumulated = None
        return reduced, after
