"""A comm that counts messages and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields

from torch import Tensor
from typing_extensions import override

from gradsieve.comm.protocol import FRAME_BYTES, Comm


@dataclass
class Traffic:
    """One rank's traffic. Bytes include the frame of each message."""

    calls: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def since(self, before: Traffic) -> Traffic:
        """The traffic since an earlier count."""
        return Traffic(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class CountingComm(Comm):
    """Wraps any comm and counts its traffic.

    An all_reduce counts as the bandwidth-optimal algorithm: a reduce-scatter and an all-gather, which are 2 (P-1)
    messages and 2 (P-1)/P of the tensor each way.

    Args:
        comm: The comm that carries the messages.

    Example:
        >>> import torch
        >>> from gradsieve import CountingComm
        >>> from gradsieve.testing import run_ranks
        >>> def bytes_received(comm):
        ...     counting = CountingComm(comm)
        ...     counting.all_gather_v(torch.ones(3))
        ...     return counting.traffic.bytes_received
        >>> run_ranks(2, bytes_received)
        [20, 20]
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.traffic = Traffic()

    @property
    def seconds_per_byte(self) -> float:  # type: ignore[override]
        """As measured by the wrapped comm."""
        return self.comm.seconds_per_byte

    @override
    def aside(self) -> AbstractContextManager[Comm]:
        return self.comm.aside()

    def reset(self) -> Traffic:
        """Start from zero; returns the traffic so far."""
        counted, self.traffic = self.traffic, Traffic()
        return counted

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.count_all_reduce(tensor.numel() * tensor.element_size())
        return self.comm.all_reduce(tensor)

    def count_all_reduce(self, tensor_bytes: int) -> None:
        """Count an all_reduce of a tensor of this size, as if it had been made here.

        Args:
            tensor_bytes: The size of the tensor.
        """
        self.traffic.calls += 1
        num_bytes = 2 * (self.size - 1) * tensor_bytes // self.size
        num_messages = 2 * (self.size - 1)
        self._sent(num_messages, num_bytes)
        self._received(num_messages, num_bytes)

    @override
    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        self.traffic.calls += 1
        for to, buffer in enumerate(buffers):
            if to != self.rank:
                self._sent(1, _num_bytes(buffer))
        for source, buffer in self.comm.all_to_all(buffers):
            if source != self.rank:
                self._received(1, _num_bytes(buffer))
            yield source, buffer

    @override
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        self.traffic.calls += 1
        received = self.comm.send_recv(buffer, to, source)
        if to is not None:
            self._sent(1, _num_bytes(buffer))
        if received is not None:
            self._received(1, _num_bytes(received))
        return received

    def _sent(self, num_messages: int, num_bytes: int) -> None:
        self.traffic.messages_sent += num_messages
        self.traffic.bytes_sent += num_bytes

    def _received(self, num_messages: int, num_bytes: int) -> None:
        self.traffic.messages_received += num_messages
        self.traffic.bytes_received += num_bytes


def _num_bytes(buffer: Tensor) -> int:
    return FRAME_BYTES + buffer.numel() * buffer.element_size()
