"""Added latency without the kernel's netem: a process that delays every frame.

The process connects a host's port to the bridge. Frames from the port's packet socket go to an interface on the bridge
and vice versa, in order, each after the same delay. Large segments that the kernel would only divide at the last moment
pass undivided (both ends use virtio headers). So a frame has up to 64 kB here, and the process keeps up with about one
gigabit per second in each direction. Its processor time is taken from the ranks: with latency, results on few cores are
pessimistic.

The interface on the bridge is a tap that the process creates. Where this user may not open /dev/net/tun, it is one end
of a veth pair, and the process has a packet socket on the other.

Run as a script inside the switch's namespace: `relay.py PORT INNER SECONDS`. INNER is the other end of the veth pair,
or the name of the tap to create. It returns when everything is set up and continues in the background until the
namespace is emptied.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

LARGEST_FRAME = 10 + 65536 + 256  # virtio header, segment, Ethernet and tunnels
MOST_WAITING_BYTES = 256 << 20
SOCKET_BYTES = 64 << 20
BATCH = 64

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
TUN = "/dev/net/tun"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN = 1, 2, 4, 8


@dataclass
class Direction:
    """Frames in one direction, each with the time at which it is due."""

    read: Callable[[], bytes]
    write: Callable[[bytes], object]
    delay_seconds: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0

    def take(self) -> None:
        """Read the frames that have arrived. An interface that is down raises errors: it has no frames."""
        with suppress(OSError):
            for _ in range(BATCH):
                frame = self.read()
                if self.waiting_bytes < MOST_WAITING_BYTES:
                    self.waiting.append((time.monotonic() + self.delay_seconds, frame))
                    self.waiting_bytes += len(frame)

    def give(self) -> float | None:
        """Write the frames that are due. Returns the seconds until the next one, or None if none waits."""
        while self.waiting:
            due, frame = self.waiting[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            self.waiting.popleft()
            self.waiting_bytes -= len(frame)
            with suppress(OSError):  # frames are lost in a full queue or on a pulled cable, as on a real link
                self.write(frame)
        return None


def open_port(name: str) -> socket.socket:
    """A packet socket on the port: it receives what the host sends, and the host receives what it sends."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    for forced, limited in ((SO_SNDBUFFORCE, socket.SO_SNDBUF), (SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BYTES)
        except PermissionError:  # only root exceeds net.core.wmem_max and rmem_max
            port.setsockopt(socket.SOL_SOCKET, limited, SOCKET_BYTES)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def open_tap(name: str) -> int:
    """A tap interface of this name; it disappears with the process."""
    import fcntl  # not on Windows, where this module is imported, too

    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN)
    return tap


def relay(port: int, inner: int, delay_seconds: float) -> None:
    """Pass frames in both directions, forever."""
    outward = Direction(lambda: os.read(port, LARGEST_FRAME), lambda frame: os.write(inner, frame), delay_seconds)
    inward = Direction(lambda: os.read(inner, LARGEST_FRAME), lambda frame: os.write(port, frame), delay_seconds)
    sources = {port: outward, inner: inward}
    while True:
        waits = [left for direction in sources.values() if (left := direction.give()) is not None]
        ready, _, _ = select.select(list(sources), [], [], min(waits, default=None))
        for source in ready:
            sources[source].take()


def main() -> None:
    port, inner, seconds = sys.argv[1:]
    is_there = inner in (name for _, name in socket.if_nameindex())
    ends = open_port(port).detach(), open_port(inner).detach() if is_there else open_tap(inner)
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    relay(*ends, float(seconds))


if __name__ == "__main__":
    main()
