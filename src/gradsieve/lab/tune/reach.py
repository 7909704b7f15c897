"""Can every pair of ranks connect? Probed before the process group is made, which would only time out."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

from gradsieve.comm.transport.address import TcpAddresses
from gradsieve.lab.tune.together import AgreedError


class Store(Protocol):
    """The part of torch's store that is needed: `get` waits until another rank has set the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def check_pairs(store: Store, rank: int, size: int) -> None:
    """Connect to each other rank, one after the other, and raise on all ranks if any pair cannot.

    The sentence names the first such pair, with ranks and addresses. It is the same on all ranks.
    """
    kind = TcpAddresses()
    try:
        listener = kind.listen(size)
    except OSError:
        listener = None  # this system has no connections of the ranks' own, and Gloo finds its own way
    store.set(f"address/{rank}", "" if listener is None else listener.address.decode())
    addresses = [store.get(f"address/{other}").decode() for other in range(size)]
    with _accepting(None if listener is None else listener.socket):
        failures = {}
        for other in (*range(rank + 1, size), *range(rank)):
            if addresses[rank] and addresses[other] and (reason := _failure(kind, addresses[other])):
                failures[other] = reason
        store.set(f"failures/{rank}", json.dumps(failures))
        # Reading them also keeps every rank listening until all have tried.
        told = [json.loads(store.get(f"failures/{source}")) for source in range(size)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # which may hold the store
        for other in range(size):
            store.get(f"read/{other}")
    for source, failed in enumerate(told):
        for to, reason in failed.items():
            raise AgreedError(
                f"rank {source} ({_host(addresses[source])}) cannot connect to rank {to} "
                f"({_host(addresses[int(to)])}): {reason}; check firewalls and routes between the two, or set "
                "GLOO_SOCKET_IFNAME to the network interface by which all machines reach each other"
            )


def _failure(kind: TcpAddresses, address: str) -> str:
    """Why there is no connection; empty if there is one."""
    try:
        kind.connect(address.encode()).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


def _host(address: str) -> str:
    port, _, host = address.partition(" ")
    return f"{host}:{port}"


@contextlib.contextmanager
def _accepting(listener: socket.socket | None) -> Iterator[None]:
    """Accept and close connections in a thread, so that the queue of the listener never fills."""
    if listener is None:
        yield
        return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
