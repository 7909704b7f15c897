"""gTop-k (Shi et al., ICDCS 2019): a binary tree that keeps the k largest at every merge. Any number of ranks.

1. Up the tree: a rank sends its entries to its parent, who adds them to its own and cuts the sum to k.
2. Down the tree: the root's k entries are the total, and go the same way back.
3. Whoever cuts or rounds keeps what it cut or rounded away, as its own leftover.
Step 3 is not the published rule, which clears a rank's residual wherever the total has an entry, although the rank's
contribution may have been cut on the way: what was cut is then lost (see `gtopk_paper`).
Cost: up to 2 ceil(log2 P) messages and 4k ceil(log2 P) words at the root, 2k each way elsewhere.
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
    """Tree of merges, each cut to k; what is cut stays with who cut it."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        total, cut = tree_top(local, k, channel)  # 1, 2
        return Reduced(total, cut), state  # 3

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """The root hears from a child in every round; every other rank from fewer children, and its parent."""
        return tree_cost(size, k, numel)


def tree_top(local: SparseVector, k: int, channel: Channel) -> tuple[SparseVector, SparseVector]:
    """The k entries that come out of the tree, and what this rank cut off on the way."""
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
    """Of the root, which receives most."""
    words = min(2 * k, numel) * num_rounds(size)
    return Cost(num_rounds(size), words, words)
