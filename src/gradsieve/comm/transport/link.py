"""What transports have in common: a process group with a timeout, and the protocols they follow.

Point-to-point calls carry every message, so that a rank hears from each peer directly: when one dies, all that wait
for it know at once, where a ring would leave the others to the timeout.
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

LARGEST_MESSAGE_BYTES = 1 << 40


Rounds = Sequence[tuple[int, int]]
"""(to, source) for each round of an exchange."""


class Transport(Protocol):
    """Messages of bytes between ranks; `messages[r]` is for rank r."""

    @property
    def seconds_per_byte(self) -> float:
        """About what a byte takes; zero in memory that the ranks share, infinite if not known."""
        ...

    def exchange(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """Yield (source, message) in the order of the rounds."""
        ...

    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """One message out, one in; None leaves that half out."""
        ...


class LinkedTransport(Transport, Protocol):
    """One that others can be built around."""

    @property
    def link(self) -> Link:
        """What it goes through."""
        ...


class Arrival(Protocol):
    """A message under way to this rank."""

    def wait(self) -> Tensor:
        """Its bytes, when all are here."""
        ...


class Link:
    """A process group with a timeout: what transports send and receive through."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.timeout_seconds = timeout_seconds

    def send(self, buffer: Tensor, to: int) -> Pending:
        """Start sending."""
        return self._start(self.group.send, buffer, to)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Start receiving into a buffer."""
        return self._start(self.group.recv, buffer, source)

    def finish(self, work: Any, peer: int | None) -> None:
        """Wait for an operation; a failure names this rank and the peer."""
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
        """The typed form of what the backend said."""
        lost = lost_ranks(self.group, peer, error)
        who = {0: "a peer", 1: "rank"}.get(len(lost), "ranks") + ",".join(f" {rank}" for rank in lost)
        return PeerLostError(
            f"rank {self.rank}: lost {who} or had no answer within {self.timeout_seconds:g} s ({error})",
            peer=lost[0] if len(lost) == 1 else None,
        )

    def room_for(self, length: int, peer: int | None, device: torch.device | None = None) -> Tensor:
        """Memory for a message whose length a peer announced; a length that cannot be true is an error."""
        try:
            if 0 <= length < LARGEST_MESSAGE_BYTES:
                return torch.empty(length, dtype=torch.uint8, device=device)
            reason = f"allowed are 0 to {LARGEST_MESSAGE_BYTES - 1}"
        except RuntimeError as error:
            reason = str(error)
        raise MessageError(f"rank {self.rank}: rank {peer} announces {length} bytes ({reason})")

    def _start(self, call: Any, buffer: Tensor, peer: int) -> Pending:
        """The group's own methods: `dist.isend` around them takes several times as long as they do."""
        try:
            return Pending(self, call([buffer], peer, 0), buffer, peer)
        except RuntimeError as error:
            raise self.lost(peer, error) from error


class Pending(NamedTuple):
    """One point-to-point operation under way; holds its buffer alive."""

    link: Link
    work: Any
    buffer: Tensor
    peer: int

    def wait(self) -> Tensor:
        """The buffer, when the operation is done."""
        self.link.finish(self.work, self.peer)
        return self.buffer
