"""What reducers need from a network: three primitives, and two methods made of them.

Buffers are 1-D contiguous tensors of any length, zero included, and of one dtype on all ranks. Lengths may differ
between ranks, and the receiver need not know them. All ranks make the same calls in the same order, each rank from one
thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from typing_extensions import deprecated

FRAME_BYTES = 8
"""The size of the length that precedes every message whose length the receiver does not know."""


class Comm(ABC):
    """One rank's end of a group of `size` ranks. A subclass implements `all_reduce`, `all_to_all` and `send_recv`."""

    rank: int
    size: int
    seconds_per_byte: float = math.inf
    """About how long this rank waits per byte that it receives; infinite if unknown."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it. The sum is the same on every rank, bit for bit."""

    @abstractmethod
    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Send `buffers[r]` to each rank r, and yield (source, buffer) as they arrive.

        The iterator must be consumed to the end. The first buffer is this rank's own, which is neither sent nor copied.
        The others arrive from rank - 1, rank - 2, ..., so that no rank receives from all others at once. The caller can
        work on one buffer while the next is under way.
        """

    @abstractmethod
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send `buffer` to rank `to` while receiving from rank `source`; with None there is no such half."""

    def aside(self) -> AbstractContextManager[Comm]:
        """A comm for calls that do not belong to a step: they are not counted, and their time is in no phase."""
        return nullcontext(self)

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """`all_to_all` to its end; returns the buffers in rank order."""
        arrived = dict(self.all_to_all(buffers))
        return [arrived[rank] for rank in range(self.size)]

    def all_gather_v(self, buffer: Tensor) -> list[Tensor]:
        """The buffers of all ranks, in rank order."""
        return self.all_to_all_v([buffer] * self.size)

    @deprecated("Comm.exchange is now called Comm.all_to_all")
    def exchange(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The former name of `all_to_all`."""
        return self.all_to_all(buffers)


def rotation(rank: int, size: int) -> list[tuple[int, int]]:
    """(to, source) for each round of an `all_to_all`: in every round all ranks send to different ranks."""
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
