"""Dense: the backend's all_reduce sums all entries. The sparse algorithms are measured against it.

A full vector (`SparseVector.full`) is summed in place, at the cost of a plain all_reduce. Its values are overwritten.
Cost: 2 (P-1)/P n words per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.vector import SparseVector
from gradsieve.wire.channel import phase


@dataclass(frozen=True)
class Dense(StatelessReducer):
    """One all_reduce of the whole vector. k is ignored."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        values = local.values if local.is_full else local.to_dense()
        with phase("all_reduce"):
            total = SparseVector.full(comm.all_reduce(values))
        return Reduced(total, SparseVector.empty(local.numel, local.values)), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """Reduce-scatter and all-gather of all entries."""
        words = 2 * numel * (size - 1) / size
        return Cost(2 * (size - 1), words, words)
