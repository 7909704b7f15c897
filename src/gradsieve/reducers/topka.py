"""TopkA: each rank gathers the selected entries of all ranks and adds them.

Used by Renggli et al. (SC 2019, https://arxiv.org/abs/1802.08021), DGC and GaussianK.
1. all_gather_v of the local entries.
2. Each rank adds them in rank order, so that all get the same bits.
The leftover is the rounding error of the codec.

Cost: P-1 messages, up to 2k(P-1) words per rank. It grows with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel


@dataclass(frozen=True)
class TopkA(StatelessReducer):
    """All-gather, then a local sum."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        gathered = channel.gather(local)  # 1
        total = add(gathered.vectors)  # 2
        return Reduced(total, channel.leftover()), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """The entries of all other ranks, sent dense if that is smaller."""
        words = min(2 * k, numel) * (size - 1)
        return Cost(size - 1, words, words)
