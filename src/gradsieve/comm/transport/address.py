"""TCP addresses: where ranks on other machines can connect to this rank."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from typing_extensions import override

from gradsieve.comm.transport.rendezvous import CONNECT_SECONDS, AddressKind, Listener

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


class TcpAddresses(AddressKind):
    """Ports of the network interface that Gloo is told to use, or else of the one that leads to the first rank."""

    @override
    def listen(self, num_peers: int) -> Listener:
        if not hasattr(select, "poll"):
            raise OSError("this system cannot wait for several connections at once")  # Windows keeps to Gloo
        family, host = own_address()
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(num_peers)
        except OSError:
            listener.close()
            raise
        return Listener(listener, f"{listener.getsockname()[1]} {host}".encode())

    @override
    def connect(self, address: bytes) -> socket.socket:
        port, _, host = address.decode("ascii", "replace").partition(" ")
        if not port.isdigit():
            raise OSError(f"{address!r} is not an address")
        return socket.create_connection((host, int(port)), CONNECT_SECONDS)


def own_address() -> tuple[socket.AddressFamily, str]:
    """This machine's address as other machines reach it; raises `OSError` if it cannot be determined."""
    if interface := os.environ.get(GLOO_INTERFACE, "").split(",")[0]:
        return socket.AF_INET, _address_of(interface)
    there = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, kind, _, _, target = socket.getaddrinfo(there, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing, but chooses the interface
        return family, str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    if sys.platform != "linux":
        raise OSError("the address of an interface is known only on Linux")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)[20:24])
