"""What reducers may ask of a network: three primitives and two forms of them.

Buffers are 1-D contiguous tensors of any length, zero included, and of one dtype on all ranks; lengths may differ
between ranks and need not be known to the receiver. All ranks make the same calls in the same order, each from one
thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

FRAME_BYTES = 8
"""Every message whose length the receiver does not know is preceded by that length."""


class Comm(ABC):
    """One rank's place in a group of `size` ranks."""

    rank: int
    size: int
    seconds_per_byte: float = math.inf
    """About what a byte of an exchange takes on its way; infinite if it is not known."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; the same on every rank bit for bit. The tensor comes back."""

    @abstractmethod
    def exchange(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Send `buffers[r]` to each rank r; yield (source, buffer) as they arrive, to be consumed to the end.

        The order is rotated: one's own first (never sent, not copied), then from rank - 1, rank - 2, ...; so nobody
        is hit by everybody at once, and the caller can work on one buffer while the next is under way.
        """

    @abstractmethod
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send `buffer` to rank `to` while receiving from rank `source`; None leaves that half out."""

    def aside(self) -> AbstractContextManager[Comm]:
        """A comm for calls that are part of no figure: not counted, and their time belongs to no phase."""
        return nullcontext(self)

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """`exchange`, complete and in rank order."""
        arrived = dict(self.exchange(buffers))
        return [arrived[rank] for rank in range(self.size)]

    def all_gather_v(self, buffer: Tensor) -> list[Tensor]:
        """Everybody's buffer, in rank order."""
        return self.all_to_all_v([buffer] * self.size)


def rotation(rank: int, size: int) -> list[tuple[int, int]]:
    """(to, source) for each round after one's own: everybody sends to a different rank in every round."""
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
