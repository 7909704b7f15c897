"""gTop-k (Shi et al., ICDCS 2019, https://arxiv.org/abs/1901.04359): a binary tree that keeps k entries at every merge.

1. Up the tree: a rank sends its entries to its parent. The parent adds them to its own and cuts the sum to k.
2. Down the tree: the root's k entries are the total, and are sent the same way back.
3. A rank that cuts or rounds keeps the cut entries and the rounding error as its leftover.

Cost: up to 2 ceil(log2 P) messages and 4k ceil(log2 P) words at the root, 2k in each direction elsewhere. Any number of
ranks.

Where this differs from the paper: step 3. The published rule clears a rank's residual wherever the total has an entry,
although the rank's contribution may have been cut on the way. Cut entries are then lost (see `gtopk_paper`).
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.comm.tree import node, num_rounds
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel


@dataclass(frozen=True)
class GTopk(StatelessReducer):
    """A tree of merges, each cut to k. The rank that cuts an entry keeps it."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        total, cut = tree_top(local, k, channel)  # 1, 2
        return Reduced(total, cut), state  # 3

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """The root receives from a child in every round. All other ranks receive from fewer children and a parent."""
        return tree_cost(size, k, numel)


def tree_top(local: SparseVector, k: int, channel: Channel) -> tuple[SparseVector, SparseVector]:
    """Return the k entries at the root of the tree, and this rank's leftover."""
    parent, children = node(channel.comm.rank, channel.comm.size)
    current, cut = local, [SparseVector.empty(local.numel, local.values)]
    for child in children:
        current, dropped = add([current, channel.receive(child)]).top(k)
        cut.append(dropped)
    if parent is None:
        current, dropped = current.top(k)
        cut.append(dropped)
    else:
        channel.send(current, parent)
    total = channel.pass_down(current, parent, children[::-1])
    return total, add([*cut, channel.leftover()])


def tree_cost(size: int, k: int, numel: int) -> Cost:
    """Return the cost of the root, which receives most."""
    words = min(2 * k, numel) * num_rounds(size)
    return Cost(num_rounds(size), words, words)
