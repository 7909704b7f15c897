"""How messages of unknown length travel between the ranks of a process group. A transport may wrap another one."""

from gradsieve.comm.transport.counted import CountedTransport
from gradsieve.comm.transport.direct import DirectTransport
from gradsieve.comm.transport.framed import FramedTransport
from gradsieve.comm.transport.link import Link, LinkedTransport, Rounds, Transport
from gradsieve.comm.transport.shared_memory import SharedMemoryTransport

__all__ = [
    "CountedTransport",
    "DirectTransport",
    "FramedTransport",
    "Link",
    "LinkedTransport",
    "Rounds",
    "SharedMemoryTransport",
    "Transport",
]
