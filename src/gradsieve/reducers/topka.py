"""TopkA: everybody gathers everybody's picks and adds them up (Renggli et al., SC 2019; DGC; GaussianK).

1. all_gather_v of the local entries.
2. Every rank adds them, in rank order, so that all get the same bits.
Nothing is left over but what the codec rounds away.
Cost: P-1 messages, up to 2k(P-1) words a rank: it grows with the number of workers.
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
        """Every rank's entries, from every rank; dense where that is smaller."""
        words = min(2 * k, numel) * (size - 1)
        return Cost(size - 1, words, words)
