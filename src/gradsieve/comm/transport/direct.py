"""Messages between machines through plain connections in place of Gloo's.

Gloo hands every message to a thread of its own and back. Measured, 4 hosts on 2 cores, 330 KB to and from each rank: an
exchange takes 4.8 ms and 2.1 ms of a rank's processor time through Gloo, 2.1 and 1.0 through connections that the
calling thread serves itself.

1. At one of the first exchanges the ranks connect (see `meeting`); unless all pairs come to speak, all stay with Gloo.
2. A message is preceded by its number and its length. The system takes what it has room for at once.
3. Whoever waits for a message meanwhile sends what is left of its own, and takes in what others send. So two never wait
   for each other, however long their messages are: one waits for another only until that one has come as far.
A lost peer is noticed at once: its connection ends.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.protocol import rotation
from gradsieve.comm.transport.address import GLOO_INTERFACE, TcpPlace
from gradsieve.comm.transport.connection import Connection
from gradsieve.comm.transport.link import LinkedTransport, Rounds
from gradsieve.comm.transport.meeting import CALL_SECONDS, met

PACE_BYTES = 1 << 20  # fewer tell of latency, not of bandwidth
PACE_SAMPLES = 7


class Pace:
    """What a byte costs in waiting, once its message is under way: before, one waits for a peer to compute."""

    def __init__(self) -> None:
        self._seconds, self._bytes = 0.0, 0
        self._samples: deque[float] = deque(maxlen=PACE_SAMPLES)
        self.seconds_per_byte = math.inf

    def add(self, seconds: float, num_bytes: int) -> None:
        """So much has come in an exchange, and so long was waited while it did."""
        self._seconds, self._bytes = self._seconds + seconds, self._bytes + num_bytes
        if self._bytes >= PACE_BYTES:
            self._samples.append(self._seconds / self._bytes)
            self._seconds, self._bytes = 0.0, 0
            self.seconds_per_byte = statistics.median(self._samples)


class DirectTransport:
    """Another transport, until its ranks have connections of their own."""

    def __init__(self, around: LinkedTransport, connected_after: int = 12, place: TcpPlace | None = None) -> None:
        self.link = around.link
        self._around = around
        self._connected_after = connected_after  # exchanges: a comm that lives for one step need not call others
        self._place = place or TcpPlace()
        self._connections: dict[int, Connection] = {}
        self._pace = Pace()
        self._exchanges = 0

    @property
    def connected(self) -> bool:
        """Whether connections are used."""
        return bool(self._connections)

    @property
    def seconds_per_byte(self) -> float:
        """See `Transport.seconds_per_byte`."""
        return self._pace.seconds_per_byte if self._connections else self._around.seconds_per_byte

    def exchange(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """See `Transport.exchange`. Sending begins with the call."""
        if self._exchanges == self._connected_after:
            self._connect()
        self._exchanges += 1
        if not self._connections:
            return self._around.exchange(messages, rounds)
        numbers = [(source, self._connections[source].expect()) for _, source in rounds]
        for to, _ in rounds:
            self._connections[to].send(messages[to])
        return self._arrivals(numbers)

    def _arrivals(self, numbers: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        waited, num_bytes = 0.0, 0
        for source, number in numbers:
            message, seconds = self._taken(source, number)
            waited, num_bytes = waited + seconds, num_bytes + message.numel()
            yield source, message
        # All together: while one waits for the first message, the others come as well.
        self._pace.add(waited, num_bytes)
        self._send_all()

    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """See `Transport.send_recv`."""
        if not self._connections:
            return self._around.send_recv(message, to, source)
        number = None if source is None else self._connections[source].expect()
        if to is not None:
            self._connections[to].send(message)
        received = None
        if source is not None and number is not None:
            received, waited = self._taken(source, number)
            self._pace.add(waited, received.numel())
        self._send_all()
        return received

    def _connect(self) -> None:
        """All ranks with all, whoever this exchange is between: all pairs are connected, or none is used."""
        rounds = rotation(self.link.rank, dist.get_world_size(self.link.group))
        found = met(self._around, rounds, self._place)
        complete = torch.tensor([len(found) == len(rounds)], dtype=torch.int32)
        self.link.finish_call(dist.all_reduce, complete, dist.ReduceOp.MIN)
        if missing := sorted({to for to, _ in rounds} - found.keys()):
            logging.getLogger("gradsieve").warning(
                "rank %d: no connection with rank %s within %g s, so messages go on through Gloo, which takes more "
                "processor time; %s can name the network interface that machines reach each other by",
                self.link.rank, ", ".join(map(str, missing)), CALL_SECONDS, GLOO_INTERFACE,
            )  # fmt: skip
        for rank, connected in found.items():
            if int(complete):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[rank] = Connection(self.link, rank, connected)
            else:
                connected.close()

    def _taken(self, source: int, number: int) -> tuple[Tensor, float]:
        """A message, and how long was waited for it while any was under way."""
        connection, deadline, waited = self._connections[source], self._deadline(), 0.0
        while (message := connection.take(number)) is None:
            waited += self._serve(source, deadline)
        return message, waited

    def _send_all(self) -> None:
        deadline = self._deadline()
        while waiting := [rank for rank, connection in self._connections.items() if not connection.all_sent]:
            self._serve(waiting[0], deadline)

    def _deadline(self) -> float:
        return time.monotonic() + self.link.timeout_seconds

    def _serve(self, awaited: int, deadline: float) -> float:
        """Wait until any connection has something to do, and do it; the seconds of that with a message under way."""
        under_way, began = any(connection.under_way for connection in self._connections.values()), time.monotonic()
        poll = select.poll()
        served = {each.descriptor: each for each in self._connections.values() if each.interest}
        for descriptor, connection in served.items():
            poll.register(descriptor, connection.interest)
        events = poll.poll(max(0.0, deadline - began) * 1e3)
        if not events:
            error = TimeoutError("timed out")
            raise self.link.lost(awaited, error) from error
        for descriptor, _ in events:
            served[descriptor].pull()
            served[descriptor].push()
        return time.monotonic() - began if under_way else 0.0
