"""TopkDSA, SparCML's dynamic sparse all-reduce (Renggli et al., SC 2019, https://arxiv.org/abs/1802.08021).

1. Each rank owns one of P index regions of equal width. Entries are sent to the owner of their region.
2. The owner adds them.
3. all_gather_v of all sums. A dense region is sent with a bitmap of its indices, a full one without indices.
4. Each rank keeps its rounding errors: of the entries that it sent to other owners, and of its own region's sums. The
   two are in different regions, so they are concatenated, not added.
If all ranks send the same run (`SparseVector.run`), the regions are equal parts of the run. All vectors then stay runs,
and indices are neither sent nor computed.

Cost: 2(P-1) messages. 4k(P-1)/P words per rank if no two ranks select the same index and entries are spread evenly, up
to (2k + n)(P-1)/P with fill-in, and more if entries crowd into one region. For a run of k entries 2k(P-1)/P words,
divided by 32 if values are sent as signs.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer, equal_bounds
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel


@dataclass(frozen=True)
class TopkDsa(StatelessReducer):
    """Split by equal regions, add, gather all sums."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        bounds = equal_bounds(local.span, comm.size)
        scattered = channel.scatter(local, local.split(bounds), bounds)  # 1
        owned = add(part for _, part in scattered.arriving)  # 2
        gathered = channel.gather_blocks(owned, bounds[comm.rank])  # 3
        kept = scattered.rounding_errors  # 4
        kept[comm.rank] = channel.leftover()
        return Reduced(SparseVector.concatenate(gathered.vectors), SparseVector.concatenate(kept)), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """A share of every rank's entries, then every owner's sums. The limit has all entries in one region.

        For runs see `run_words`.
        """
        width = -(-numel // size)
        sums = min(2 * k * size, numel)
        words = min(2 * k, numel) * (size - 1) / size + sums * (size - 1) / size
        return Cost(2 * (size - 1), words, min(2 * k, width) * (size - 1) + min(sums, width * (size - 1)))
