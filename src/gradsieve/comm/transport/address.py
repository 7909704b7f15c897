"""Where other machines reach this one: the addresses that ranks listen at and call."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from gradsieve.comm.transport.meeting import CALL_SECONDS, Listener

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


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
