"""Ranks as threads of one process, with mailboxes for a network: the laboratory for tests and simulation."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from gradsieve.comm.protocol import Comm, rotation
from gradsieve.errors import PeerLostError


class Room:
    """Where the ranks of one run meet: a mailbox for each pair, and who has left."""

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._mail: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def leave(self, rank: int) -> None:
        """This rank sends nothing more: whoever waits for it is told."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def put(self, source: int, to: int, buffer: Tensor) -> None:
        """Post a copy: a real network does not see what the sender does to its buffer later."""
        with self._changed:
            self._mail[source, to].append(buffer.clone())
            self._changed.notify_all()

    def take(self, source: int, to: int) -> Tensor:
        """The next buffer from `source`; an error if it left, or stays silent too long."""
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            mail = self._mail[source, to]
            while not mail:
                if source in self._left:
                    raise PeerLostError(f"rank {to}: rank {source} ended while its message was awaited")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise PeerLostError(f"rank {to}: nothing from rank {source} within {self.timeout_seconds:g} s")
            return mail.popleft()


class LocalComm(Comm):
    """One thread's place in a room."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank = rank
        self.size = room.size
        self._room = room

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Everybody adds everybody's, in rank order: the same sum everywhere."""
        parts = self.all_gather_v(tensor.clone())
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        return tensor

    def exchange(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """See `Comm.exchange`."""
        yield self.rank, buffers[self.rank]
        rounds = rotation(self.rank, self.size)
        for to, _ in rounds:
            self._room.put(self.rank, to, buffers[to])
        for _, source in rounds:
            yield source, self._room.take(source, self.rank)

    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """See `Comm.send_recv`."""
        if to is not None:
            self._room.put(self.rank, to, buffer)
        return None if source is None else self._room.take(source, self.rank)
