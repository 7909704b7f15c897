"""Threshold reuse, after Ok-Topk (Li and Hoefler, PPoPP 2022, https://arxiv.org/abs/2201.07598).

Gradients change slowly, and so does their k-th magnitude.
1. Every `period` steps the k largest magnitudes are selected exactly.
2. In between, entries not below a threshold are selected, in the same pass that adds the gradient.
3. Counts grow from step to step by some factor. The threshold for the next step is the magnitude that k divided by this
   factor reach now: a quantile of a sample of the selected entries.
4. If slightly more than k entries reach it, they are trimmed to about k, by a quantile again.
5. If the count is outside `band` (in units of k), this step is evaluated exactly.

Cost: no pass of its own if accumulating has collected the entries. Exact evaluation is cheap if too many entries were
selected, since the k largest are among them. It costs one more pass if too few were.

Where this differs from the paper: the published code moves the threshold by a few percent instead of 3 to 5. But with
error feedback many entries are just below the threshold and reach it together. Counts from 0.01 k to 4 k were seen.
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

GROWTHS = 0.6, 1.6  # accepted growths of the count: a jump says nothing about the steps after it
FLATNESS = 0.1  # percent by which the threshold is lowered for a percent more entries; small, to select rather too few
EXACT_SLACK = 0.97  # in a step that evaluates exactly, candidates are collected above this times the old threshold


class ThresholdState(NamedTuple):
    """The number of steps so far, and the threshold for the next one."""

    step: int = 0
    threshold: float | None = None
    reached: float = 0.0  # entries that reached the threshold when it was set
    growth: float = 1.0  # entries that reach it one step later, over `reached`


@dataclass(frozen=True)
class Threshold(Selector[ThresholdState]):
    """Selects entries not below a threshold, which is predicted between exact evaluations."""

    period: int = 32  # steps between exact evaluations; more saves passes, fewer follows changes more closely
    band: tuple[float, float] = (2 / 3, 5 / 4)  # accepted counts, in k; narrower is closer to k, evaluates more often

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
            # A threshold of zero means that there were fewer than k entries to send: too few are accepted then.
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
    """Return the state that aims at k in the next step. `values` are those that reach the threshold now."""
    count, aim = values.numel(), k / state.growth
    if threshold > 0:
        threshold = reached_by(values, aim) if aim < count else threshold * (count / aim) ** FLATNESS
    return ThresholdState(state.step + 1, threshold, aim, state.growth)
