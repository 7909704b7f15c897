"""Ranks as threads of one process, with queues as the network: for tests and simulation."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from torch import Tensor
from typing_extensions import override

from gradsieve.comm.protocol import Comm, rotation
from gradsieve.errors import PeerLostError


class Room:
    """What the ranks of one run share: a queue for each pair of ranks, and the set of ranks that have ended."""

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._mail: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def leave(self, rank: int) -> None:
        """Mark a rank as ended, and wake the ranks that wait for it."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def put(self, source: int, to: int, buffer: Tensor) -> None:
        """Queue a copy: as on a real network, the sender may then overwrite its buffer."""
        with self._changed:
            self._mail[source, to].append(buffer.clone())
            self._changed.notify_all()

    def take(self, source: int, to: int) -> Tensor:
        """The next buffer from `source`; raises if that rank has ended, or sends nothing within the timeout."""
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
    """One thread as a rank. `gradsieve.testing.run_ranks` makes one for each thread that it starts.

    Args:
        rank: The number of this rank.
        room: Shared by all ranks of the run.

    Example:
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.all_reduce(torch.tensor([comm.rank + 1.0])).tolist())
        [[3.0], [3.0]]
    """

    def __init__(self, rank: int, room: Room) -> None:
        self.rank = rank
        self.size = room.size
        self._room = room

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        # Each rank adds the tensors of all ranks in rank order, so that all get the same bits.
        parts = self.all_gather_v(tensor.clone())
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        return tensor

    @override
    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield self.rank, buffers[self.rank]
        rounds = rotation(self.rank, self.size)
        for to, _ in rounds:
            self._room.put(self.rank, to, buffers[to])
        for _, source in rounds:
            yield source, self._room.take(source, self.rank)

    @override
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        if to is not None:
            self._room.put(self.rank, to, buffer)
        return None if source is None else self._room.take(source, self.rank)
