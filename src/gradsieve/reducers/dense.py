"""Dense: everything is summed by the backend's all_reduce. What the sparse algorithms are measured against.

Cost: 2 (P-1)/P n words a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsieve.comm import Comm
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class Dense(StatelessReducer):
    """One all_reduce of the whole vector; k plays no part."""

    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        """See `Reducer.reduce`."""
        total = SparseVector.full(comm.all_reduce(local.to_dense()))
        return Reduced(total, SparseVector.empty(local.numel, local.values)), state
