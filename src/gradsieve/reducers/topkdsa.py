"""TopkDSA, SparCML's dynamic sparse all-reduce (Renggli et al., SC 2019).

1. Each rank owns one of P index regions of equal width; entries travel to the owner of their region.
2. The owner adds them.
3. all_gather_v of all sums. A region that has filled up travels dense, as its values alone, when that is smaller.
Nothing is left over. Cost: 2(P-1) messages; 4k(P-1)/P words a rank if nobody's picks coincide with nobody's region
crowded, up to (2k + n)(P-1)/P with fill-in, more when picks crowd into one region.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsieve.comm import Comm
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer, equal_bounds
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel


@dataclass(frozen=True)
class TopkDsa(StatelessReducer):
    """Split by equal regions, add, gather all sums."""

    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        """See `Reducer.reduce`."""
        channel = Channel(comm, local.numel, k)
        bounds = equal_bounds(local.numel, comm.size)
        arriving = channel.scatter(local.split(bounds), bounds)  # 1
        owned = add(part for _, part in arriving)  # 2
        blocks = channel.gather_blocks(owned, bounds[comm.rank], bounds[comm.rank + 1])  # 3
        total = SparseVector.concatenate(blocks)
        return Reduced(total, SparseVector.empty(local.numel, local.values)), state
