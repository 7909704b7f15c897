"""Threshold reuse, after Ok-Topk (Li and Hoefler, PPoPP 2022): gradients change slowly, so does their k-th magnitude.

1. Every `period` steps the k largest magnitudes are picked exactly.
2. In between, what is not below a threshold is picked, in the very pass that adds the gradient in.
3. The threshold for the next step is the magnitude that fewer than k entries reach now, by as much as entries have
   become more from step to step: a quantile of a sample of those picked.
4. If it lets somewhat more than k through nevertheless, they are trimmed to about k, by a quantile again.
5. When the count leaves `band` (in units of k), this step is evaluated exactly after all.
The published code moves the threshold by a few percent instead of 3 to 5. But with error feedback many entries wait
just below the threshold, and come over it together: counts of a hundredth and of four times k were seen. Exact
evaluation is cheap when too many are picked, since the k largest are among them, and costs one more pass when too few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import Selector
from gradsieve.selectors.search import reached_by, top_entries, trimmed
from gradsieve.vector import SparseVector

GROWTHS = 0.6, 1.6  # that are believed: a jump says nothing of the steps after it
FLATNESS = 0.1  # by how many percent a threshold is lowered to be reached by a percent more entries: rather too few
EXACT_SLACK = 0.97  # at a step that evaluates exactly, candidates are collected from this times the old threshold


class ThresholdState(NamedTuple):
    """Steps done so far, and the threshold for the next one."""

    step: int = 0
    threshold: float | None = None
    reached: float = 0.0  # how many entries did when it was set
    growth: float = 1.0  # how many times more do a step later


@dataclass(frozen=True)
class Threshold(Selector[ThresholdState]):
    """Picks what is not below a threshold that is evaluated now and then and predicted in between."""

    period: int = 32  # steps between exact evaluations; more saves passes, fewer follows changes closer
    band: tuple[float, float] = (
        2 / 3,
        5 / 4,
    )  # counts (in k) that are accepted; narrower holds k closer, evaluates more often

    def __post_init__(self) -> None:
        if self.period < 1:
            raise InputError(f"period must be at least 1, got {self.period}")
        if not 0 < self.band[0] <= 1 <= self.band[1]:
            raise InputError(f"band must be positive and enclose 1, got {self.band}")

    @override
    def init(self, numel: int) -> ThresholdState:
        return ThresholdState()

    @override
    def floor(self, state: ThresholdState) -> float | None:
        if state.threshold is None:
            return None
        return state.threshold * (EXACT_SLACK if self._due(state) else 1.0)

    @override
    def select(
        self, accumulated: Tensor, k: int, state: ThresholdState, candidates: Entries | None
    ) -> tuple[SparseVector, ThresholdState]:
        numel = accumulated.numel()
        threshold = state.threshold
        if threshold is not None and not self._due(state):
            entries = candidates or kernels(accumulated).compact(accumulated, threshold, k)
            count = entries[0].numel()
            state = state._replace(growth=_smoothed(state.growth, count / max(state.reached, 1)))
            # A threshold of zero means that there were fewer than k entries to send: few are fine then.
            enough = count >= self.band[0] * k or threshold == 0
            if enough and count <= self.band[1] * k:
                return SparseVector.trusted(trimmed(entries, k), numel), _next(state, entries[1], threshold, k)
            candidates = entries
        entries, threshold = top_entries(accumulated, k, candidates)
        return SparseVector.trusted(entries, numel), _next(state, entries[1], threshold, k)

    @override
    def rescaled(self, state: ThresholdState, factor: float) -> ThresholdState:
        return state._replace(threshold=None if state.threshold is None else state.threshold * factor)

    def _due(self, state: ThresholdState) -> bool:
        return state.step % self.period == 0


def _smoothed(growth: float, seen: float) -> float:
    return (growth + seen) / 2 if GROWTHS[0] <= seen <= GROWTHS[1] else growth


def _next(state: ThresholdState, values: Tensor, threshold: float, k: int) -> ThresholdState:
    """Aim at k in the next step; `values` are all that reach the threshold now."""
    count, aim = values.numel(), k / state.growth
    if threshold > 0:
        threshold = reached_by(values, aim) if aim < count else threshold * (count / aim) ** FLATNESS
    return ThresholdState(state.step + 1, threshold, aim, state.growth)
