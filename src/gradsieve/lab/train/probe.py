"""What the papers draw from a training run, measured in some of its steps.

- xi of Ok-Topk's assumption: |Topk(mean accumulated) - total / P| over |mean gradient|. The means are taken by
  all_reduce calls of their own, which neither traffic counts nor times of phases include.
- contraction: the share of |accumulated|² that stays behind, with the exact k largest and with those really picked,
  against the bounds 1 - k/n and (1 - k/n)².
- counts: entries picked and delivered, against k.
- a histogram of the largest group's accumulated gradient, with the exact threshold, the one in use, and a Gaussian's.

A recipe is probed by wrapping its three parts; the wrapped recipe does and prints as the one inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.feedback.base import Accumulated, WrappedFeedback
from gradsieve.kernels import Entries
from gradsieve.recipes import Recipe
from gradsieve.reducers.protocol import Reduced, WrappedReducer
from gradsieve.selectors.protocol import WrappedSelector
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces

BINS = 64
RANGE = 3.0  # the histogram reaches this many times the largest threshold


@dataclass(frozen=True)
class Sample:
    """One group in one step, on one rank."""

    numel: int
    k: int
    selected: int
    delivered: int
    deviation: float  # |Topk(mean accumulated) - total / P|²
    gradient: float  # |mean gradient|²
    accumulated: float  # |accumulated|²
    left_exact: float  # of it, beside the k largest
    left: float  # of it, beside those picked
    histogram: dict[str, Any]


@dataclass
class Probe:
    """Collects while a step goes on."""

    step: int = 0
    wanted: bool = False
    samples: list[Sample] = field(default_factory=list)  # of the step under way
    rows: list[dict[str, Any]] = field(default_factory=list)
    grad: Tensor | None = None
    accumulated: Tensor | None = None
    comm: Comm | None = None  # that the recipe reduces over

    def begin(self, step: int, wanted: bool) -> None:
        """Before a step."""
        self._finish()
        self.step, self.wanted = step, wanted

    def taken(self) -> list[dict[str, Any]]:
        """A row for each step that was probed since this was last asked; a dense step has none."""
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
    """The same recipe, watched."""
    return replace(
        recipe,
        selector=ProbedSelector(recipe.selector, probe),
        reducer=ProbedReducer(recipe.reducer, probe),
        feedback=ProbedFeedback(recipe.feedback, probe),
    )


@dataclass(frozen=True, repr=False)
class ProbedFeedback(WrappedFeedback):
    """Sees the gradient."""

    probe: Probe

    def accumulate(self, grad: Pieces, out: Pieces, state: Any, floor: float | None, expected: int) -> Accumulated:
        """See `Feedback.accumulate`."""
        if self.probe.wanted and self.probe.comm is not None:
            with self.probe.comm.aside():
                self.probe.grad = grad.copied_to(torch.empty(grad.numel, device=grad.device))
        return super().accumulate(grad, out, state, floor, expected)


@dataclass(frozen=True, repr=False)
class ProbedSelector(WrappedSelector):
    """Sees what is selected from."""

    probe: Probe

    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Entries | None) -> tuple[SparseVector, Any]:
        """See `Selector.select`."""
        self.probe.accumulated = accumulated if self.probe.wanted else None
        return super().select(accumulated, k, state, candidates)


@dataclass(frozen=True, repr=False)
class ProbedReducer(WrappedReducer):
    """Sees what came of it, and asks all ranks for the means."""

    probe: Probe

    def start(self, numel: int, comm: Comm) -> Any:
        """See `Reducer.start`."""
        self.probe.comm = comm
        return super().start(numel, comm)

    def reduce(self, local: SparseVector, k: int, state: Any, comm: Comm) -> tuple[Reduced, Any]:
        """See `Reducer.reduce`."""
        reduced, after = super().reduce(local, k, state, comm)
        probe = self.probe
        if probe.wanted and probe.grad is not None and probe.accumulated is not None:
            with comm.aside() as beside:
                probe.samples.append(_sample(probe.grad, probe.accumulated, local, reduced.total, k, beside))
            probe.grad = probe.accumulated = None
        return reduced, after


def _sample(grad: Tensor, accumulated: Tensor, local: SparseVector, total: SparseVector, k: int, comm: Comm) -> Sample:
    mean_grad = comm.all_reduce(grad.clone()) / comm.size
    mean = comm.all_reduce(accumulated.clone()) / comm.size
    deviation = _largest(mean, k) - total.to_dense() / comm.size
    exact = _largest(accumulated, k)
    return Sample(
        numel=accumulated.numel(),
        k=k,
        selected=local.nnz,
        delivered=total.nnz,
        deviation=_square(deviation),
        gradient=_square(mean_grad),
        accumulated=_square(accumulated),
        left_exact=_square(accumulated - exact),
        left=_square(accumulated - local.to_dense()),
        histogram=_histogram(accumulated, exact, local, k),
    )


def _histogram(accumulated: Tensor, exact: Tensor, local: SparseVector, k: int) -> dict[str, Any]:
    """Entries beyond its ends are counted in the outermost bins."""
    thresholds = {
        "exact": _least(exact[exact != 0]),
        "used": _least(local.values),
        "gaussian": _gaussian(accumulated, k),
    }
    reach = RANGE * max(thresholds.values()) or 1.0
    counts = torch.histc(accumulated.float().clamp(-reach, reach).cpu(), BINS, -reach, reach)
    return {"reach": reach, "counts": [int(count) for count in counts], "thresholds": thresholds}


def _gaussian(accumulated: Tensor, k: int) -> float:
    """The magnitude that k entries would reach if they were normal with this mean and deviation."""
    share = min(1 - 1e-7, 1 - k / accumulated.numel())
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(share, dtype=torch.float64)))
    return abs(float(accumulated.mean())) + quantile * float(accumulated.std(correction=0))


def _largest(vector: Tensor, k: int) -> Tensor:
    """The k largest entries by magnitude, zero elsewhere."""
    places = torch.topk(vector.abs(), k, sorted=False).indices
    return torch.zeros_like(vector).index_copy_(0, places, vector[places])


def _least(values: Tensor) -> float:
    return float(values.abs().min()) if values.numel() else 0.0


def _square(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2


def histogram_edges(histogram: dict[str, Any]) -> Sequence[float]:
    """Where its bins begin and end."""
    reach = histogram["reach"]
    return [reach * (2 * number / BINS - 1) for number in range(BINS + 1)]
