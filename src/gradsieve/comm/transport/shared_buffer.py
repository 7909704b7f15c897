"""Memory that one process writes and others read: it has no name, and is freed with the processes that use it."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if sys.platform == "linux":
    import fcntl

NAME = "gradsieve"
NUM_BUFFERS = 2  # of each process, used in turn
ALIGNED_BYTES = 64  # a cache line

Array = np.ndarray[Any, np.dtype[Any]]


class Location(NamedTuple):
    """Where a message is."""

    serial: int  # of the buffer; a larger one that replaces it has another serial, the same modulo `NUM_BUFFERS`
    offset: int
    length: int


class SharedBuffer:
    """Memory that this process writes and others may read. It grows as messages do."""

    def __init__(self, number: int) -> None:
        self.serial = number
        self.descriptor = -1
        self._memory: Array = np.empty(0, np.uint8)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def write(self, messages: Sequence[Tensor]) -> list[Location]:
        """Write messages, and return their locations. A message that is given several times is written once."""
        different = {(message.data_ptr(), message.numel()): message for message in messages}
        edges = list(accumulate((_aligned(length) for _, length in different), initial=0))
        if edges[-1] > self._memory.size or self.descriptor < 0:
            self._grow(edges[-1])
        locations = {}
        for start, (key, message) in zip(edges, different.items(), strict=False):
            self._memory[start : start + message.numel()] = message.numpy()
            locations[key] = Location(self.serial, start, message.numel())
        return [locations[message.data_ptr(), message.numel()] for message in messages]

    def _grow(self, num_bytes: int) -> None:
        """Replace the memory by a larger one. Processes that have mapped the old one keep it."""
        room = max(mmap.PAGESIZE, num_bytes + num_bytes // 2)
        descriptor = new_memory()
        os.ftruncate(descriptor, room)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # a reader would crash if it shrank
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self.serial = descriptor, self.serial + NUM_BUFFERS
        self._memory = np.frombuffer(mmap.mmap(descriptor, room), np.uint8)


class MappedBuffer(NamedTuple):
    """Another process's buffer, to read from."""

    serial: int
    memory: Array

    @classmethod
    def of(cls, descriptor: int, serial: int) -> MappedBuffer:
        """Map a buffer that another process has handed over, and close its descriptor."""
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the memory may shrink")
            return cls(serial, np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8))
        finally:
            os.close(descriptor)

    def read(self, location: Location) -> Tensor:
        """A copy of the message at a location."""
        serial, offset, length = location
        if not (serial == self.serial and 0 <= offset <= offset + length <= self.memory.size):
            raise OSError(f"{location} is not in a buffer of {self.memory.size} bytes with serial {self.serial}")
        message = torch.empty(length, dtype=torch.uint8)
        message.numpy()[:] = self.memory[offset : offset + length]
        return message


def new_memory() -> int:
    """The descriptor of memory without a name; raises `OSError` where that is forbidden."""
    return os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNED_BYTES
