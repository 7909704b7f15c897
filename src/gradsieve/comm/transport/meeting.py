"""How ranks come to connections of their own, beside the process group that brought them together.

All ranks do this together, and agree about every pair in the end:
1. Every rank listens somewhere and tells the others where, and a secret with it.
2. Of two ranks the lower calls the higher, says the secret and its own rank, and tells through the group that it did.
3. Who was called answers those who know the secret, and tells through the group whom. The others hang up.
A pair that does not come to speak, for whatever reason, goes on through the group: nobody waits long, nothing fails.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from gradsieve.comm.transport.link import LinkedTransport, Rounds

SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sq")  # the secret of who is called, and the rank that calls
CALL_SECONDS = 3.0  # for what takes milliseconds; a firewall may swallow calls
HELLO_SECONDS = 0.5  # for who calls and says nothing
CALLS_AT_ONCE = 16


class Listener(NamedTuple):
    """A socket that waits for calls, and where it can be called."""

    socket: socket.socket
    address: bytes


class MeetingPlace(Protocol):
    """A kind of address."""

    def listen(self, num_callers: int) -> Listener:
        """Begin to listen; an `OSError` where that cannot be."""
        ...

    def call(self, address: bytes) -> socket.socket:
        """A connection to who listens there, made within `CALL_SECONDS`; an `OSError` if nobody within reach does."""
        ...


def met(transport: LinkedTransport, rounds: Rounds, place: MeetingPlace) -> dict[int, socket.socket]:
    """Connections to those of the ranks in `rounds` with whom they could be made; both ends of each have it."""
    if not rounds:
        return {}
    rank, secret = transport.link.rank, secrets.token_bytes(SECRET_BYTES)
    tell = _Teller(transport, rounds)
    with ExitStack() as stack:
        listener = _listener(place, len(rounds))
        if listener is not None:
            stack.enter_context(listener.socket)
        offers = tell({to: b"" if listener is None else secret + listener.address for to, _ in rounds})
        able = {source: offer for source, offer in offers.items() if source > rank and offer and listener is not None}
        called = _called(place, able, rank)
        callers = tell.whether(called)
        answered = {} if listener is None else _answered(listener.socket, secret, callers)
        confirmed = tell.whether(answered)
    for other in called.keys() - confirmed:
        called.pop(other).close()
    return answered | called


class _Teller(NamedTuple):
    transport: LinkedTransport
    rounds: Rounds

    def whether(self, chosen: Container[int]) -> set[int]:
        """Tell each rank whether it is among the chosen; who said yes comes back."""
        told = self({to: bytes([to in chosen]) for to, _ in self.rounds})
        return {source for source, saying in told.items() if any(saying)}

    def __call__(self, sayings: Mapping[int, bytes]) -> dict[int, bytes]:
        """Tell each rank something through the group; what each told comes back."""
        nothing = torch.empty(0, dtype=torch.uint8)
        messages = [nothing] * (1 + max(sayings, default=0))
        for to, saying in sayings.items():
            messages[to] = torch.tensor(list(saying), dtype=torch.uint8)
        arrived = self.transport.exchange(messages, self.rounds)
        return {source: message.numpy().tobytes() for source, message in arrived}


def _listener(place: MeetingPlace, num_callers: int) -> Listener | None:
    try:
        return place.listen(num_callers)
    except OSError:
        return None


def _called(place: MeetingPlace, offers: Mapping[int, bytes], rank: int) -> dict[int, socket.socket]:
    """All are called at once: one after the other, those whom a firewall hides would add up to minutes."""

    def call(offer: bytes) -> socket.socket | None:
        try:
            connection = place.call(offer[SECRET_BYTES:])
        except (OSError, ValueError):  # the latter for names that cannot be one
            return None
        try:
            connection.sendall(HELLO.pack(offer[:SECRET_BYTES], rank))
        except OSError:
            connection.close()
            return None
        return connection

    if not offers:
        return {}
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        connections = zip(offers, pool.map(call, offers.values()), strict=True)
        return {other: connection for other, connection in connections if connection is not None}


def _answered(listener: socket.socket, secret: bytes, callers: set[int]) -> dict[int, socket.socket]:
    """The connections of those who have called, as far as they get through in time; strangers are passed over."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CALL_SECONDS
    while (missing := callers - connections.keys()) and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        rank = _caller(connection, secret)
        if rank in missing:
            connections[rank] = connection
        else:
            connection.close()
    return connections


def _caller(connection: socket.socket, secret: bytes) -> int:
    """The rank that calls; -1 if it does not say, or does not know the secret."""
    connection.settimeout(HELLO_SECONDS)
    try:
        hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return -1
    if len(hello) < HELLO.size:
        return -1
    said, rank = HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(said, secret) else -1
