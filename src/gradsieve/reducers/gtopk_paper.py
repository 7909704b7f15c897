"""gTop-k with the published residual rule, for comparison. It does not conserve.

As `gtopk`, but a rank keeps of its own entries just those whose index is not in the total. An entry that was cut at an
inner node, while another rank's entry at the same index came through, is kept by nobody.
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
    """Loses what is cut at inner nodes in coordinates that come through."""

    conserving: ClassVar[bool] = False

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        total, _ = tree_top(local, k, Channel(comm, local, k, self.codec))
        return Reduced(total, local.without(total)), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """As `GTopk`."""
        return tree_cost(size, k, numel)
