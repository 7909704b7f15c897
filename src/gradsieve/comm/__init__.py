"""Networks behind one small protocol: a process group, MPI, or threads of one process. Wrappers extend them."""

from gradsieve.comm.counting import CountingComm, Traffic
from gradsieve.comm.local import LocalComm, Room
from gradsieve.comm.process_group import TorchComm
from gradsieve.comm.protocol import FRAME_BYTES, Comm

__all__ = ["FRAME_BYTES", "Comm", "CountingComm", "LocalComm", "Room", "TorchComm", "Traffic"]
