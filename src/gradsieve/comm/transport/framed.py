"""Messages of any length through Gloo, each preceded by its length."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.comm.protocol import FRAME_BYTES
from gradsieve.comm.transport.link import Arrival, Link, LinkedTransport, Pending, Rounds

FIRST_PART_BYTES = 1 << 20  # longer messages take two calls; a longer first part takes more memory per peer


class FramedArrival(NamedTuple):
    """A first part, preceded by the message's length. The rest, if any, follows in a second part of known length."""

    first: Pending

    def wait(self) -> Tensor:
        """Wait for the message, and return it without its frame."""
        start = self.first.wait()
        length = int(start[:FRAME_BYTES].view(torch.int64)[0])
        room = FIRST_PART_BYTES - FRAME_BYTES
        if 0 <= length <= room:
            return start[FRAME_BYTES : FRAME_BYTES + length]
        whole = self.first.link.room_for(length, self.first.peer)
        whole[:room] = start[FRAME_BYTES:]
        self.first.link.receive(whole[room:], self.first.peer).wait()
        return whole


class FramedTransport(LinkedTransport):
    """For Gloo, where a message may be shorter than the buffer that is posted for it.

    So no separate call is needed to send lengths. A small call takes 1 to 7 ms on Gloo, whatever its size.
    """

    seconds_per_byte: float = math.inf

    def __init__(self, link: Link, in_flight: int = 8) -> None:
        self.link = link
        self.in_flight = in_flight  # peers at once: more hides latency, fewer avoids incast

    def send(self, message: Tensor, to: int) -> list[Pending]:
        """Start to send a message of any length."""
        framed = torch.empty(FRAME_BYTES + message.numel(), dtype=torch.uint8)
        framed[:FRAME_BYTES].view(torch.int64)[0] = message.numel()
        framed[FRAME_BYTES:] = message
        parts = [framed[:FIRST_PART_BYTES], framed[FIRST_PART_BYTES:]]
        return [self.link.send(part, to) for part in parts if part.numel()]

    def receive(self, source: int) -> Arrival:
        """Start to receive a message of unknown length."""
        return FramedArrival(self.link.receive(torch.empty(FIRST_PART_BYTES, dtype=torch.uint8), source))

    @override
    def all_to_all(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """Keeps a few rounds under way at once. The first ones start with this call."""
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

    @override
    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        arrival = None if source is None else self.receive(source)
        sent = [] if to is None else self.send(message, to)
        received = None if arrival is None else arrival.wait()
        for pending in sent:
            pending.wait()
        return received
