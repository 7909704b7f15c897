"""How ranks open connections to each other, with the help of the process group.

All ranks do this together, and the two ranks of each pair agree on the outcome:
1. Each rank listens at an address, and sends the address and a secret to all others through the group.
2. The lower rank of each pair connects to the higher one and sends it the secret and its own rank. Through the group it
   tells whether it has connected.
3. The higher rank accepts connections that know the secret, and tells through the group which. The lower rank closes
   the other ones.
A pair that cannot connect keeps to the group. No rank waits long, and nothing fails.
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
HELLO = struct.Struct(f"<{SECRET_BYTES}sq")  # the secret of the rank that listens, and the rank that connects
CONNECT_SECONDS = 3.0  # connecting takes milliseconds, unless a firewall drops packets
HELLO_SECONDS = 0.5  # a connection that sends no hello for so long is closed
CONNECTS_AT_ONCE = 16  # threads


class Listener(NamedTuple):
    """A socket that accepts connections, and its address."""

    socket: socket.socket
    address: bytes


class AddressKind(Protocol):
    """A kind of address, such as TCP ports."""

    def listen(self, num_peers: int) -> Listener:
        """Listen at a new address; raises `OSError` if that is impossible here."""
        ...

    def connect(self, address: bytes) -> socket.socket:
        """A connection to an address, made within `CONNECT_SECONDS`; raises `OSError` if there is none."""
        ...


def connected_peers(transport: LinkedTransport, rounds: Rounds, kind: AddressKind) -> dict[int, socket.socket]:
    """Connections to those ranks in `rounds` that can be connected: both ranks of a pair have one, or none has."""
    if not rounds:
        return {}
    rank, secret = transport.link.rank, secrets.token_bytes(SECRET_BYTES)
    group = _Group(transport, rounds)
    with ExitStack() as stack:
        listener = _listener(kind, len(rounds))
        if listener is not None:
            stack.enter_context(listener.socket)
        offers = group.swap({to: b"" if listener is None else secret + listener.address for to, _ in rounds})
        able = {source: offer for source, offer in offers.items() if source > rank and offer and listener is not None}
        connected = _connected(kind, able, rank)
        connecting = group.swap_flags(connected)
        accepted = {} if listener is None else _accepted(listener.socket, secret, connecting)
        confirmed = group.swap_flags(accepted)
    for peer in connected.keys() - confirmed:
        connected.pop(peer).close()
    return accepted | connected


class _Group(NamedTuple):
    transport: LinkedTransport
    rounds: Rounds

    def swap(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each rank its message through the group; returns the message of each rank."""
        nothing = torch.empty(0, dtype=torch.uint8)
        buffers = [nothing] * (1 + max(messages, default=0))
        for to, message in messages.items():
            buffers[to] = torch.tensor(list(message), dtype=torch.uint8)
        arrived = self.transport.all_to_all(buffers, self.rounds)
        return {source: buffer.numpy().tobytes() for source, buffer in arrived}

    def swap_flags(self, chosen: Container[int]) -> set[int]:
        """Tell each rank whether it is in `chosen`; returns the ranks that have chosen this one."""
        told = self.swap({to: bytes([to in chosen]) for to, _ in self.rounds})
        return {source for source, flag in told.items() if any(flag)}


def _listener(kind: AddressKind, num_peers: int) -> Listener | None:
    try:
        return kind.listen(num_peers)
    except OSError:
        return None


def _connected(kind: AddressKind, offers: Mapping[int, bytes], rank: int) -> dict[int, socket.socket]:
    """Connects to many ranks at once: one after the other, ranks behind a firewall would take minutes."""

    def connect(offer: bytes) -> socket.socket | None:
        try:
            connection = kind.connect(offer[SECRET_BYTES:])
        except (OSError, ValueError):  # ValueError: an invalid host name
            return None
        try:
            connection.sendall(HELLO.pack(offer[:SECRET_BYTES], rank))
        except OSError:
            connection.close()
            return None
        return connection

    if not offers:
        return {}
    with ThreadPoolExecutor(CONNECTS_AT_ONCE) as pool:
        connections = zip(offers, pool.map(connect, offers.values()), strict=True)
        return {peer: connection for peer, connection in connections if connection is not None}


def _accepted(listener: socket.socket, secret: bytes, connecting: set[int]) -> dict[int, socket.socket]:
    """Connections from these ranks, as far as they arrive within `CONNECT_SECONDS`. All others are closed."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while (missing := connecting - connections.keys()) and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        rank = _identified(connection, secret)
        if rank in missing:
            connections[rank] = connection
        else:
            connection.close()
    return connections


def _identified(connection: socket.socket, secret: bytes) -> int | None:
    """The rank at the other end; None if it sends no hello, or not the secret."""
    connection.settimeout(HELLO_SECONDS)
    try:
        hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) < HELLO.size:
        return None
    said, rank = HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(said, secret) else None
