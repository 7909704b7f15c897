"""Networks, real and local, behind one small protocol; extended by wrapping."""

from gradsieve.comm.counting import CountingComm, Traffic
from gradsieve.comm.local import LocalComm, Room
from gradsieve.comm.process_group import TorchComm
from gradsieve.comm.protocol import FRAME_BYTES, Comm

__all__ = ["FRAME_BYTES", "Comm", "CountingComm", "LocalComm", "Room", "TorchComm", "Traffic"]
