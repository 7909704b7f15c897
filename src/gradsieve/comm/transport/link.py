"""The base of all transports: their protocols, and a process group with a timeout.

Every message is sent point to point, so that a rank hears from each peer directly. If a rank dies, all ranks that wait
for it notice at once. In a ring most ranks would notice only at the timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.transport.loss import lost_ranks
from gradsieve.errors import MessageError, PeerLostError

LARGEST_MESSAGE_BYTES = 1 << 40  # a terabyte: a length above it is an error of the peer, not a message


Rounds = Sequence[tuple[int, int]]
"""(to, source) for each round of an `all_to_all`."""


class Transport(Protocol):
    """Sends messages of bytes between ranks."""

    @property
    def seconds_per_byte(self) -> float:
        """About how long a rank waits per byte; zero in shared memory, infinite if unknown."""
        ...

    def all_to_all(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """Send `messages[r]` to each rank r of the rounds, and yield (source, message) in the order of the rounds."""
        ...

    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send one message and receive one; with None there is no such half."""
        ...


class LinkedTransport(Transport, Protocol):
    """A transport that other transports can wrap."""

    link: Link


class Arrival(Protocol):
    """A message under way to this rank."""

    def wait(self) -> Tensor:
        """Wait for all its bytes, and return them."""
        ...


class Link:
    """A process group with a timeout. Transports send and receive through it."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.timeout_seconds = timeout_seconds

    def send(self, buffer: Tensor, to: int) -> Pending:
        """Start to send."""
        return self._start(self.group.send, buffer, to)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Start to receive into a buffer."""
        return self._start(self.group.recv, buffer, source)

    def finish(self, work: Any, peer: int | None) -> None:
        """Wait for an operation; a failure raises an error that names this rank and the peer."""
        try:
            work.wait(timedelta(seconds=self.timeout_seconds))
        except RuntimeError as error:
            raise self.lost(peer, error) from error

    def finish_call(self, collective: Any, *args: Any) -> None:
        """Run a collective to its end within the timeout."""
        try:
            work = collective(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.lost(None, error) from error
        self.finish(work, None)

    def lost(self, peer: int | None, error: BaseException) -> PeerLostError:
        """The error to raise for a failure of the backend; `peer` is the rank that was waited for, if known."""
        lost = lost_ranks(self.group, peer, error)
        who = {0: "a peer", 1: "rank"}.get(len(lost), "ranks") + ",".join(f" {rank}" for rank in lost)
        return PeerLostError(
            f"rank {self.rank}: lost {who} or had no answer within {self.timeout_seconds:g} s ({error})",
            peer=lost[0] if len(lost) == 1 else None,
        )

    def room_for(self, length: int, peer: int | None, device: torch.device | None = None) -> Tensor:
        """Memory for a message whose length a peer announced; raises if the length is impossible."""
        try:
            if 0 <= length < LARGEST_MESSAGE_BYTES:
                return torch.empty(length, dtype=torch.uint8, device=device)
            reason = f"allowed are 0 to {LARGEST_MESSAGE_BYTES - 1}"
        except RuntimeError as error:
            reason = str(error)
        raise MessageError(f"rank {self.rank}: rank {peer} announces {length} bytes ({reason})")

    def _start(self, call: Any, buffer: Tensor, peer: int) -> Pending:
        """Calls the group's own methods: `dist.isend`, which wraps them, takes several times as long."""
        try:
            return Pending(self, call([buffer], peer, 0), buffer, peer)
        except RuntimeError as error:
            raise self.lost(peer, error) from error


class Pending(NamedTuple):
    """A point-to-point operation under way. It keeps its buffer alive."""

    link: Link
    work: Any
    buffer: Tensor
    peer: int

    def wait(self) -> Tensor:
        """Wait for the operation, and return its buffer."""
        self.link.finish(self.work, self.peer)
        return self.buffer
