"""SparDL (Zhao et al., ICDE 2024, https://arxiv.org/abs/2304.00737): log P rounds, and messages that do not grow.

Rank b sums block b of P equal index blocks. Any number of ranks.
1. Each rank cuts each block of its entries to ceil(k/P).
2. Reduce-scatter in ceil(log2 P) rounds, at distances 2^i < P from the largest down. At distance d a rank holds partial
   sums of the blocks from its own up to 2d further. It sends the further half to the rank d ahead, which adds it and
   cuts each block to ceil(k/P) again.
3. All-gather of the finished blocks in as many rounds, along the same distances in reverse (Bruck).
4. A rank that cuts or rounds keeps the cut entries and the rounding error.

Cost: 2 ceil(log2 P) messages, 4k(P-1)/P words per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.comm.tree import num_rounds
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, Reduced, StatelessReducer, equal_bounds
from gradsieve.vector import SparseVector, add
from gradsieve.wire import Channel


@dataclass(frozen=True)
class SparDL(StatelessReducer):
    """Sums and gathers blocks along doubling distances, and cuts at every sum."""

    @override
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        blocks = _Blocks(local, k, channel)  # 1
        for distance in reversed(_distances(comm.size)):  # 2
            blocks.pass_on(distance)
        total = blocks.collected()  # 3
        return Reduced(total, add([*blocks.cut, channel.leftover()])), state  # 4

    def cost(self, size: int, k: int, numel: int) -> Cost:
        """P-1 blocks of ceil(k/P) entries to be summed, and as many summed blocks."""
        words = 4 * -(-k // size) * (size - 1)
        blocks = size - 1  # gathered blocks, each preceded by its size
        return Cost(2 * num_rounds(size), words, words, control_words=2 * blocks, handed_on=blocks)


class _Blocks:
    """The blocks of one rank during one step, by block number, and the entries that it has cut."""

    def __init__(self, local: SparseVector, k: int, channel: Channel) -> None:
        self.rank, self.size = channel.comm.rank, channel.comm.size
        self.channel = channel
        self.bounds = equal_bounds((0, local.numel), self.size)
        self.budget = -(-k // self.size)
        self.cut: list[SparseVector] = []
        self.held = [self._cut(block) for block in local.split(self.bounds)]

    def pass_on(self, distance: int) -> None:
        """Do one round of the reduce-scatter."""
        reach = min(2 * distance, self.size)
        arrived = self._swap(
            self._ahead(self.rank, distance, reach),
            to=(self.rank + distance) % self.size,
            source=(self.rank - distance) % self.size,
        )
        for number in self._ahead(self.rank, 0, reach - distance):
            self.held[number] = self._cut(add([self.held[number], arrived[number]]))

    def collected(self) -> SparseVector:
        """Do the all-gather. Blocks are forwarded as the bytes that their owners sent."""
        wrapped = {self.rank: self.channel.wrap(self.held[self.rank])}
        for distance in _distances(self.size):
            source = (self.rank + distance) % self.size
            span = min(distance, self.size - distance)
            outgoing = [wrapped[number] for number in self._ahead(self.rank, 0, span)]
            arrived = self.channel.swap_wrapped(outgoing, (self.rank - distance) % self.size, source)
            wrapped.update(zip(self._ahead(source, 0, span), arrived, strict=True))
        blocks = [wrapped[number].vector for number in range(self.size)]
        self.channel.check_order(blocks)
        return SparseVector.concatenate(blocks)

    def _ahead(self, rank: int, start: int, stop: int) -> list[int]:
        return [(rank + offset) % self.size for offset in range(start, stop)]

    def _swap(self, numbers: list[int], to: int, source: int) -> list[SparseVector]:
        """Send some blocks as one vector. Returns the received vector, split into all P blocks."""
        outgoing = SparseVector.concatenate([self.held[number] for number in sorted(numbers)])
        return self.channel.swap(outgoing, to, source).split(self.bounds)

    def _cut(self, block: SparseVector) -> SparseVector:
        kept, dropped = block.top(self.budget)
        self.cut.append(dropped)
        return kept


def _distances(size: int) -> list[int]:
    return [1 << power for power in range((size - 1).bit_length())]
