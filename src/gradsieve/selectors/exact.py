"""Exact top-k: the k entries of largest magnitude, as `torch.topk` finds them; among equals the lower index.

1. Collect what is above a floor: the last step's k-th magnitude, lowered a little, or one guessed from a sample.
2. Cut the candidates to k. If the floor was too high for k candidates, guess again (see `search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradsieve.kernels import Entries
from gradsieve.selectors.protocol import Selector
from gradsieve.selectors.search import top_entries
from gradsieve.vector import SparseVector


class ExactState(NamedTuple):
    """The k-th magnitude of the last step: only a hint, it never changes what is picked."""

    kth: float | None = None


@dataclass(frozen=True)
class Exact(Selector[ExactState]):
    """Picks the k entries of largest magnitude."""

    slack: float = 0.95  # the floor is this times the last k-th magnitude; lower: fewer misses, more candidates

    def init(self, numel: int) -> ExactState:
        """See `Selector.init`."""
        return ExactState()

    def floor(self, state: ExactState) -> float | None:
        """See `Selector.floor`."""
        return None if state.kth is None else state.kth * self.slack

    def select(
        self, accumulated: Tensor, k: int, state: ExactState, candidates: Entries | None
    ) -> tuple[SparseVector, ExactState]:
        """See `Selector.select`."""
        entries, kth = top_entries(accumulated, k, candidates)
        return SparseVector.trusted(entries, accumulated.numel()), ExactState(kth)

    def rescaled(self, state: ExactState, factor: float) -> ExactState:
        """See `Selector.rescaled`."""
        return ExactState(None if state.kth is None else state.kth * factor)
