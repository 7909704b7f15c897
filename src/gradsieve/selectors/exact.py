"""Exact top-k: the k entries of largest magnitude, as `torch.topk` finds them; among equals the lower index.

1. Collect what is above a floor: the last step's k-th magnitude, lowered by what it may move in a step, or one guessed
   from a sample.
2. Cut the candidates to k. If the floor was too high for k candidates, guess again (see `search`).
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

LEAST_MARGIN, LARGEST_MARGIN = 0.005, 0.3
FORGETTING = 0.9  # of what the k-th magnitude moved once, in a step


class ExactState(NamedTuple):
    """Of the last step: only a hint, it never changes what is picked."""

    kth: float | None = None  # magnitude
    drift: float = 0.03  # by which part of itself it moved lately, at most


@dataclass(frozen=True)
class Exact(Selector[ExactState]):
    """Picks the k entries of largest magnitude."""

    caution: float = 1.5  # how many times its drift the k-th magnitude may fall; more: fewer misses, more candidates

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
