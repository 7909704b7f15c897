"""gTop-k with the published residual rule, for comparison. It breaks the law of conservation.

As `gtopk`, except that a rank keeps those of its own entries whose index is not in the total. If an entry was cut at an
inner node and another rank's entry at the same index was delivered, no rank keeps the cut entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.gtopk import tree_cost, tree_top
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.vector import SparseVector
from gradsieve.wire import Channel


@dataclass(frozen=True)
class GTopkPaper(StatelessReducer):
    """gTop-k that loses entries cut at inner nodes if another rank's entry at the same index is delivered."""

    conserving: ClassVar[bool] = False

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        total, _ = tree_top(local, k, Channel(comm, local, k, self.codec))
        return Reduced(total, local.without(total)), state

    @override
    def cost(self, size: int, k: int, numel: int) -> Cost:

        return tree_cost(size, k, numel)
