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
import os
import select
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.meeting import CALL_SECONDS, Listener, met
from gradsieve.comm.protocol import rotation
from gradsieve.comm.transport import Link, LinkedTransport, Rounds
from gradsieve.errors import MessageError

FRAME = struct.Struct("<2q")  # number and length of a message
PACE_BYTES = 1 << 20  # fewer tell of latency, not of bandwidth
PACE_SAMPLES = 7
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


class Wire:
    """The connection with one rank. Nothing here waits."""

    def __init__(self, link: Link, peer: int, connection: socket.socket) -> None:
        self._link = link
        self._peer = peer
        self._connection = connection
        self._connection.setblocking(False)
        self.descriptor = connection.fileno()
        self._unsent: deque[memoryview] = deque()
        self._sent, self._expected = 0, 0  # messages
        self._arrived: deque[tuple[int, Tensor]] = deque()
        self._end: OSError | None = None  # why nothing will arrive any more
        self._frame = bytearray(FRAME.size)
        self._body: Tensor | None = None  # None: a frame is being read
        self._room = memoryview(self._frame)  # yet to be filled

    def __del__(self) -> None:
        self._connection.close()

    @property
    def interest(self) -> int:
        """What to poll for."""
        return (0 if self._end else select.POLLIN) | (select.POLLOUT if self._unsent else 0)

    @property
    def all_sent(self) -> bool:
        """Whether the system has taken everything."""
        return not self._unsent

    def send(self, message: Tensor) -> None:
        """Begin to send; the message must not change until it has left."""
        self._unsent.append(memoryview(FRAME.pack(self._sent, message.numel())))
        if message.numel():
            self._unsent.append(_view(message))
        self._sent += 1
        self.push()

    def expect(self) -> int:
        """The number of the next message to take: one more than any asked for before."""
        self._expected += 1
        return self._expected - 1

    def push(self) -> None:
        """Send as much as the system takes."""
        try:
            while self._unsent:
                self._drop(self._connection.sendmsg(list(self._unsent)[:4]))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._link.lost(self._peer, error) from error

    def _drop(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._unsent.popleft()
            if num_bytes < len(first):
                self._unsent.appendleft(first[num_bytes:])
            num_bytes -= min(num_bytes, len(first))

    @property
    def under_way(self) -> bool:
        """Whether a message has come in part."""
        return self._body is not None or len(self._room) < FRAME.size

    def pull(self) -> None:
        """Take in what has come."""
        while self._end is None:
            try:
                count = self._connection.recv_into(self._room)
            except BlockingIOError:
                return
            except OSError as error:
                self._end = error
                return
            if count == 0:
                self._end = ConnectionResetError("its connection ended")
            self._room = self._room[count:]
            if not self._room:
                self._filled()

    def _filled(self) -> None:
        """A frame or a body is complete."""
        number, length = FRAME.unpack(self._frame)
        if self._body is None and length:
            self._body = self._link.room_for(length, self._peer)
            self._room = _view(self._body)
            return
        body = torch.empty(0, dtype=torch.uint8) if self._body is None else self._body
        self._arrived.append((number, body))
        self._body, self._room = None, memoryview(self._frame)

    def take(self, number: int) -> Tensor | None:
        """The message of this number, None if it is not here yet; one that somebody did not read is an error."""
        if not self._arrived:
            self.pull()
        if not self._arrived:
            if self._end is not None:
                raise self._link.lost(self._peer, self._end) from self._end
            return None
        found, message = self._arrived.popleft()
        if found != number:
            raise MessageError(
                f"rank {self._link.rank}: malformed message from rank {self._peer}: it is number {found}, not {number}"
            )
        return message


def _view(message: Tensor) -> memoryview:
    array: Any = message.numpy()
    return memoryview(array)


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
        self._wires: dict[int, Wire] = {}
        self._pace = Pace()
        self._exchanges = 0

    @property
    def connected(self) -> bool:
        """Whether connections are used."""
        return bool(self._wires)

    @property
    def seconds_per_byte(self) -> float:
        """See `Transport.seconds_per_byte`."""
        return self._pace.seconds_per_byte if self._wires else self._around.seconds_per_byte

    def exchange(self, messages: Sequence[Tensor], rounds: Rounds) -> Iterator[tuple[int, Tensor]]:
        """See `Transport.exchange`. Sending begins with the call."""
        if self._exchanges == self._connected_after:
            self._connect()
        self._exchanges += 1
        if not self._wires:
            return self._around.exchange(messages, rounds)
        numbers = [(source, self._wires[source].expect()) for _, source in rounds]
        for to, _ in rounds:
            self._wires[to].send(messages[to])
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
        if not self._wires:
            return self._around.send_recv(message, to, source)
        number = None if source is None else self._wires[source].expect()
        if to is not None:
            self._wires[to].send(message)
        received = None
        if source is not None and number is not None:
            received, waited = self._taken(source, number)
            self._pace.add(waited, received.numel())
        self._send_all()
        return received

    def _connect(self) -> None:
        """All ranks with all, whoever this exchange is between: all pairs are connected, or none is used."""
        rounds = rotation(self.link.rank, dist.get_world_size(self.link.group))
        connections = met(self._around, rounds, self._place)
        complete = torch.tensor([len(connections) == len(rounds)], dtype=torch.int32)
        self.link.finish_call(dist.all_reduce, complete, dist.ReduceOp.MIN)
        if missing := sorted({to for to, _ in rounds} - connections.keys()):
            logging.getLogger("gradsieve").warning(
                "rank %d: no connection with rank %s within %g s, so messages go on through Gloo, which takes more "
                "processor time; %s can name the network interface that machines reach each other by",
                self.link.rank, ", ".join(map(str, missing)), CALL_SECONDS, GLOO_INTERFACE,
            )  # fmt: skip
        for rank, connection in connections.items():
            if int(complete):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._wires[rank] = Wire(self.link, rank, connection)
            else:
                connection.close()

    def _taken(self, source: int, number: int) -> tuple[Tensor, float]:
        """A message, and how long was waited for it while any was under way."""
        wire, deadline, waited = self._wires[source], self._deadline(), 0.0
        while (message := wire.take(number)) is None:
            waited += self._serve(source, deadline)
        return message, waited

    def _send_all(self) -> None:
        deadline = self._deadline()
        while waiting := [rank for rank, wire in self._wires.items() if not wire.all_sent]:
            self._serve(waiting[0], deadline)

    def _deadline(self) -> float:
        return time.monotonic() + self.link.timeout_seconds

    def _serve(self, awaited: int, deadline: float) -> float:
        """Wait until any connection has something to do, and do it; the seconds of that with a message under way."""
        under_way, began = any(wire.under_way for wire in self._wires.values()), time.monotonic()
        poll, wires = select.poll(), {wire.descriptor: wire for wire in self._wires.values() if wire.interest}
        for descriptor, wire in wires.items():
            poll.register(descriptor, wire.interest)
        events = poll.poll(max(0.0, deadline - began) * 1e3)
        if not events:
            error = TimeoutError("timed out")
            raise self.link.lost(awaited, error) from error
        for descriptor, _ in events:
            wires[descriptor].pull()
            wires[descriptor].push()
        return time.monotonic() - began if under_way else 0.0


class TcpPlace:
    """An address of the network that the ranks' machines share."""

    def listen(self, num_callers: int) -> Listener:
        """See `MeetingPlace`. At the interface Gloo is told to use, else at the one that leads to the first rank."""
        if not hasattr(select, "poll"):
            raise OSError("this system cannot wait for several connections at once")  # Windows stays with Gloo
        family, host = own_address()
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(num_callers)
        except OSError:
            listener.close()
            raise
        return Listener(listener, f"{listener.getsockname()[1]} {host}".encode())

    def call(self, address: bytes) -> socket.socket:
        """See `MeetingPlace`."""
        port, _, host = address.decode("ascii", "replace").partition(" ")
        if not port.isdigit():
            raise OSError(f"{address!r} is no address")
        return socket.create_connection((host, int(port)), CALL_SECONDS)


def own_address() -> tuple[socket.AddressFamily, str]:
    """Where other machines reach this one; an `OSError` where it cannot be told."""
    if interface := os.environ.get(GLOO_INTERFACE, "").split(",")[0]:
        return socket.AF_INET, _address_of(interface)
    there = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, kind, _, _, target = socket.getaddrinfo(there, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it only finds the way
        return family, str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    if sys.platform != "linux":
        raise OSError("only Linux tells the address of an interface")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)[20:24])
