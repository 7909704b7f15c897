"""Exact top-k: the k entries of largest magnitude, as in `torch.topk`, and the lower index among equals.

1. Collect the entries above a floor. It is the last step's k-th magnitude, lowered by as much as it may move in a step.
   At the first step it is estimated from a sample.
2. Cut the candidates to k. If the floor was too high for k candidates, estimate it again (see `search`).

Cost: no pass of its own if accumulating has collected enough candidates. Otherwise one, or several if the floor is too
high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries
from gradsieve.selectors.protocol import Selector
from gradsieve.selectors.search import top_entries
from gradsieve.vector import SparseVector

LEAST_MARGIN, LARGEST_MARGIN = 0.005, 0.3  # of the floor below the k-th magnitude, as a fraction of it
FORGETTING = 0.9  # decay per step of the largest relative move of the k-th magnitude


class ExactState(NamedTuple):
    """A hint from the last step. It never changes which entries are selected."""

    kth: float | None = None  # the k-th magnitude
    drift: float = 0.03  # its largest relative move per step, lately


@dataclass(frozen=True)
class Exact(Selector[ExactState]):
    """Selects the k entries of largest magnitude."""

    caution: float = 1.5  # the floor is this many drifts below the k-th magnitude; more misses less, collects more

    @override
    def init(self, numel: int) -> ExactState:
        return ExactState()

    @override
    def floor(self, state: ExactState) -> float | None:
        if state.kth is None:
            return None
        return state.kth * (1 - min(LEAST_MARGIN + self.caution * state.drift, LARGEST_MARGIN))

    @override
    def select(
        self, accumulated: Tensor, k: int, state: ExactState, candidates: Entries | None
    ) -> tuple[SparseVector, ExactState]:
        entries, kth = top_entries(accumulated, k, candidates)
        moved = abs(kth / state.kth - 1) if state.kth else 0.0
        state = ExactState(kth, max(moved, FORGETTING * state.drift) if math.isfinite(moved) else state.drift)
        return SparseVector.trusted(entries, accumulated.numel()), state

    @override
    def rescaled(self, state: ExactState, factor: float) -> ExactState:
        return state._replace(kth=None if state.kth is None else state.kth * factor)
