"""Sparse vectors between the ranks of one reduction: the layer at which reducers are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.errors import MessageError
from gradsieve.vector import SparseVector
from gradsieve.wire.message import Expected, pack, unpack


class Channel:
    """A comm that carries the sparse vectors of one step, all of length `numel`, reduced with the same `k`."""

    def __init__(self, comm: Comm, numel: int, k: int) -> None:
        self.comm = comm
        self._expected = Expected(comm.rank, numel, k)

    def scatter(
        self, parts: Sequence[SparseVector], bounds: Sequence[int] | None = None
    ) -> Iterator[tuple[int, SparseVector]]:
        """Send part r to rank r; yield (source, part) as they arrive, one's own first.

        With bounds, part r lies in `[bounds[r], bounds[r+1])` and so must what arrives here in this rank's own range.
        """
        numel = self._expected.numel
        ranges = [(0, numel)] * self.comm.size if bounds is None else list(pairwise(bounds))
        own = parts[self.comm.rank]
        messages = [
            _nothing(own.values) if rank == self.comm.rank else pack(part, self._expected, *ranges[rank])
            for rank, part in enumerate(parts)
        ]
        for source, message in self.comm.exchange(messages):
            mine = source == self.comm.rank
            yield source, own if mine else unpack(message, self._expected, *ranges[self.comm.rank], source)

    def gather(self, vector: SparseVector, low: int = 0, high: int | None = None) -> list[SparseVector]:
        """Everybody's vector in rank order, one's own as the others see it. This rank's lies in `[low, high)`."""
        numel = self._expected.numel
        message = pack(vector, self._expected, low, numel if high is None else high)
        messages = self.comm.all_gather_v(message)
        return [unpack(m, self._expected, 0, numel, source) for source, m in enumerate(messages)]

    def gather_blocks(self, block: SparseVector, low: int = 0, high: int | None = None) -> list[SparseVector]:
        """`gather` for blocks whose indices follow each other from rank to rank; joined, they are one vector."""
        blocks = self.gather(block, low, high)
        self.check_order(blocks)
        return blocks

    def swap(self, vector: SparseVector, to: int, source: int) -> SparseVector:
        """Send a vector to one rank while receiving one from another."""
        received = self.comm.send_recv(self._packed(vector), to, source)
        return self._unpacked(received, source)

    def send(self, vector: SparseVector, to: int) -> None:
        """Send a vector to one rank, who receives."""
        self.comm.send_recv(self._packed(vector), to, None)

    def receive(self, source: int) -> SparseVector:
        """Receive a vector from one rank, who sends."""
        return self._unpacked(self.comm.send_recv(torch.empty(0, dtype=torch.uint8), None, source), source)

    def _packed(self, vector: SparseVector) -> Tensor:
        return pack(vector, self._expected, 0, self._expected.numel)

    def _unpacked(self, message: Tensor | None, source: int) -> SparseVector:
        assert message is not None, "a comm returns what was received"
        return unpack(message, self._expected, 0, self._expected.numel, source)

    def check_order(self, blocks: Sequence[SparseVector]) -> None:
        """Blocks of several ranks must not overlap, or their join would not be a vector."""
        last = -1
        for rank, block in enumerate(blocks):
            if block.nnz == 0:
                continue
            if int(block.indices[0]) <= last:
                raise MessageError(
                    f"rank {self.comm.rank}: the block of rank {rank} begins at index {int(block.indices[0])}, "
                    f"but earlier blocks reach to {last}"
                )
            last = int(block.indices[-1])


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)
