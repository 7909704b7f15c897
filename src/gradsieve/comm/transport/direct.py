"""Messages between machines through plain TCP connections instead of Gloo's.

Gloo passes every message to a thread of its own and back. Measured, 4 hosts on 2 cores, 330 KB to and from each rank:
an `all_to_all` takes 4.8 ms, and 2.1 ms of a rank's processor time, through Gloo. It takes 2.1 ms and 1.0 ms through
connections that the calling thread serves itself.

1. At one of the first calls the ranks connect (see `rendezvous`). Unless all pairs can connect, all keep to Gloo.
2. A message is preceded by its number and its length. The system takes as many bytes as it has room for at once.
3. A rank that waits for a message keeps sending and receiving everything else. So ranks cannot deadlock on large
   messages.
The loss of a peer is noticed at once: its connection ends.
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
from typing_extensions import override

from gradsieve.comm.protocol import rotation
from gradsieve.comm.transport.address import GLOO_INTERFACE, TcpAddresses
from gradsieve.comm.transport.connection import Connection
from gradsieve.comm.transport.link import LinkedTransport, Rounds
from gradsieve.comm.transport.rendezvous import CONNECT_SECONDS, AddressKind, connected_peers

PACE_BYTES = 1 << 20  # bytes per sample: fewer would measure latency, not bandwidth
PACE_SAMPLES = 7  # of which the median counts


class Pace:
    """Seconds of waiting per byte, counted while a message is under way: before, a rank waits for peers to compute."""

    def __init__(self) -> None:
        self._seconds, self._bytes = 0.0, 0
        self._samples: deque[float] = deque(maxlen=PACE_SAMPLES)
        self.seconds_per_byte = math.inf

    def add(self, seconds: float, num_bytes: int) -> None:
        """Count the bytes of one call, and the seconds that were waited for them."""
        self._seconds, self._bytes = self._seconds + seconds, self._bytes + num_bytes
        if self._bytes >= PACE_BYTES:
            self._samples.append(self._seconds / self._bytes)
            self._seconds, self._bytes = 0.0, 0
            self.seconds_per_byte = statistics.median(self._samples)


class DirectTransport(LinkedTransport):
    """Uses another transport until its ranks are connected, and then the connections."""

    def __init__(self, inner: LinkedTransport, connect_after: int = 12, kind: AddressKind | None = None) -> None:
        self.link = inner.link
        self._inner = inner
        self._connect_after = connect_after  # calls of `all_to_all`: a comm that is used for one step does not connect
        self._kind = kind or TcpAddresses()
        self._connections: dict[int, Connection] = {}
        self._pace = Pace()
        self._calls = 0

    @property
    def connected(self) -> bool:
        """Whether the connections are used."""
        return bool(self._connections)

    @property
    @override
    def seconds_per_byte(self) -> float:
        return self._pace.seconds_per_byte if self._connections else self._inner.seconds_per_byte

    @override
    def all_to_all(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """Starts to send with this call, not with the first arrival."""
        if self._calls == self._connect_after:
            self._connect()
        self._calls += 1
        if not self._connections:
            return self._inner.all_to_all(messages, rounds)
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
        # One sample for all messages: while this rank waits for the first one, the others arrive as well.
        self._pace.add(waited, num_bytes)
        self._send_all()

    @override
    def send_recv(self, message: Tensor, to: int | None, source: int | None) -> Tensor | None:
        if not self._connections:
            return self._inner.send_recv(message, to, source)
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
        """Connect all ranks of the group, not only those of this call's rounds. If one pair fails, none is used."""
        rounds = rotation(self.link.rank, dist.get_world_size(self.link.group))
        found = connected_peers(self._inner, rounds, self._kind)
        complete = torch.tensor([len(found) == len(rounds)], dtype=torch.int32)
        self.link.finish_call(dist.all_reduce, complete, dist.ReduceOp.MIN)
        if missing := sorted({to for to, _ in rounds} - found.keys()):
            logging.getLogger("gradsieve").warning(
                "rank %d: no connection with rank %s within %g s, so messages still go through Gloo, which takes more "
                "processor time. Set %s to the network interface by which the machines reach each other",
                self.link.rank, ", ".join(map(str, missing)), CONNECT_SECONDS, GLOO_INTERFACE,
            )  # fmt: skip
        for rank, connected in found.items():
            if int(complete):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[rank] = Connection(self.link, rank, connected)
            else:
                connected.close()

    def _taken(self, source: int, number: int) -> tuple[Tensor, float]:
        """A message, and the seconds that this rank waited for it while any message was under way."""
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
        """Wait for events on any connection, and handle them.

        Returns the seconds if a message was under way, or else zero. Raises if the deadline passes without an event.
        """
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
