"""How messages of unknown length travel between the ranks of a process group.

Point-to-point calls carry every message, so that a rank hears from each peer directly: when one dies, all that wait
for it know at once, where a ring would leave the others to the timeout.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.loss import lost_ranks
from gradsieve.comm.protocol import FRAME_BYTES
from gradsieve.errors import MessageError, PeerLostError

FIRST_PART_BYTES = 1 << 20
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


class FramedArrival(NamedTuple):
    """A first part with the length in front; what did not fit follows in a second message of known size."""

    first: Pending

    def wait(self) -> Tensor:
        """The message without its frame."""
        start = self.first.wait()
        length = int(start[:FRAME_BYTES].view(torch.int64)[0])
        room = FIRST_PART_BYTES - FRAME_BYTES
        if 0 <= length <= room:
            return start[FRAME_BYTES : FRAME_BYTES + length]
        whole = self.first.link.room_for(length, self.first.peer)
        whole[:room] = start[FRAME_BYTES:]
        self.first.link.receive(whole[room:], self.first.peer).wait()
        return whole


class FramedTransport:
    """For Gloo, which lets a message be shorter than the buffer posted for it.

    So no lengths are exchanged beforehand: one call fewer for each exchange, and a small call costs 1 to 7 ms on Gloo
    whatever its size.
    """

    seconds_per_byte = math.inf

    def __init__(self, link: Link, in_flight: int = 8) -> None:
        self.link = link
        self.in_flight = in_flight  # how many peers at once: more hides latency, fewer avoids incast

    def send(self, message: Tensor, to: int) -> list[Pending]:
        """Start sending one message of any length."""
        framed = torch.empty(FRAME_BYTES + message.numel(), dtype=torch.uint8)
        framed[:FRAME_BYTES].view(torch.int64)[0] = message.numel()
        framed[FRAME_BYTES:] = message
        parts = [framed[:FIRST_PART_BYTES], framed[FIRST_PART_BYTES:]]
        return [self.link.send(part, to) for part in parts if part.numel()]

    def receive(self, source: int) -> Arrival:
        """Start receiving one message of unknown length."""
        return FramedArrival(self.link.receive(torch.empty(FIRST_PART_BYTES, dtype=torch.uint8), source))

    def exchange(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """Keep a few rounds under way at once, the first ones from now on; arrivals come in the order of the rounds."""
        sent: list[Pending] = []
        under_way: deque[tuple[int, Arrival]] = deque()
        ahead = iter(rounds)

        def start_more() -> None:
            while len(under_way) < self.in_flight and (next_round := next(ahead, None)) is not None:
                to, source = next_round
                under_way.append((source, self.receive(source)))
                sent.extend(self.send(messages[to], to))

        def arrivals() -> Iterator[tuple[int, Tensor]]:
            while under_way:
                source, arrival = under_way.popleft()
                yield source, arrival.wait()
                start_more()
            for pending in sent:
                pending.wait()

        start_more()
        return arrivals()

    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """See `Transport.send_recv`."""
        arrival = None if source is None else self.receive(source)
        sent = [] if to is None else self.send(message, to)
        received = None if arrival is None else arrival.wait()
        for pending in sent:
            pending.wait()
        return received


class CountedTransport:
    """For any backend (NCCL): lengths first, in one small all-to-all, then data in messages of known size."""

    seconds_per_byte = math.inf

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link = link
        self.device = device

    def exchange(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """All rounds in one batch, as NCCL wants them; empty messages are known to both sides and not sent."""
        sizes = torch.tensor([m.numel() for m in messages], dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(sizes)
        self.link.finish_call(dist.all_to_all_single, theirs, sizes)
        lengths = theirs.tolist()
        buffers = {s: self.link.room_for(lengths[s], s, self.device) for _, s in rounds}
        operations = []
        for to, source in rounds:
            if lengths[source]:
                operations.append(self._operation(dist.irecv, buffers[source], source))
            if messages[to].numel():
                operations.append(self._operation(dist.isend, messages[to], to))
        self._run(operations)
        for _, source in rounds:
            yield source, buffers[source]

    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """The length travels first, between the two ranks only."""
        length = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        theirs = torch.zeros_like(length)
        self._run(self._pair(length, to, theirs, source))
        received = self.link.room_for(int(theirs), source, self.device)
        self._run(self._pair(message, to if message.numel() else None, received, source if len(received) else None))
        return None if source is None else received

    def _pair(self, out: Tensor, to: int | None, into: Tensor, source: int | None) -> list[dist.P2POp]:
        sends = [] if to is None else [self._operation(dist.isend, out, to)]
        return sends + ([] if source is None else [self._operation(dist.irecv, into, source)])

    def _operation(self, call: Any, buffer: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(call, buffer, group=self.link.group, group_peer=peer)

    def _run(self, operations: list[dist.P2POp]) -> None:
        if not operations:
            return
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.link.lost(None, error) from error
        for work in works:
            self.link.finish(work, None)
