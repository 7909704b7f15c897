"""Sparse vectors between the ranks of one reduction. Reducers are written in terms of these operations.

A codec may round the values of a message. `pack` returns the values that the receivers will decode, and the sender
keeps the rounding error:
1. The channel adds the rounding errors of all messages to `leftover`, except those of `scatter`.
2. `scatter` returns its rounding errors to the reducer, because they depend on which entries reach the total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.errors import MessageError, PeerLostError
from gradsieve.vector import Rounding, SparseVector, add
from gradsieve.wire.message import NO_NOTE, Array, Codec, Expected, Packed


class Gathered(NamedTuple):
    """The vectors of all ranks, as all ranks decode them, and their notes; both in rank order."""

    vectors: list[SparseVector]
    notes: list[Array]


class Scattered(NamedTuple):
    """The parts of a vector, each on its way to the rank that owns it."""

    vector: SparseVector
    roundings: Sequence[Rounding]  # of each part; this rank's own part is not sent and so not rounded
    arriving: Iterator[tuple[int, SparseVector]]  # (source, part), this rank's own first; to be consumed to the end

    @property
    def rounding(self) -> Rounding:
        """Of the whole vector."""
        if all(rounding.exact for rounding in self.roundings):
            return Rounding.none(self.vector)
        return Rounding(self.vector, self.vector.with_values([part.decoded.values for part in self.roundings]))

    @property
    def rounding_errors(self) -> list[SparseVector]:
        """Of each part."""
        return [rounding.error for rounding in self.roundings]


class Wrapped(NamedTuple):
    """A message that ranks pass on unchanged, and the vector that it decodes to."""

    message: Tensor
    vector: SparseVector


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the name of the phase in a `PeerLostError` that is raised inside."""
    try:
        yield
    except PeerLostError as error:
        error.phase = error.phase or name
        raise


class Channel:
    """Carries the sparse vectors of one step, all like `local` and reduced with the same `k`, over a comm."""

    def __init__(self, comm: Comm, local: SparseVector, k: int, codec: Codec) -> None:
        self.comm = comm
        self.codec = codec.for_link(comm.seconds_per_byte)
        self._rounding_errors: list[SparseVector] = []
        self._like = local
        self._expected = Expected(comm.rank, local.numel, k, local.values.dtype, local.values.device)

    def leftover(self) -> SparseVector:
        """The sum of all rounding errors so far, except those of `scatter`."""
        if self._rounding_errors:
            return add(self._rounding_errors)
        return SparseVector.empty(self._like.numel, self._like.values)

    def keep(self, rounding_error: SparseVector) -> None:
        """Add to the leftover."""
        self._rounding_errors.append(rounding_error)

    def scatter(
        self, vector: SparseVector, parts: Sequence[SparseVector], bounds: Sequence[int] | None = None
    ) -> Scattered:
        """Send part r of a vector to rank r.

        With bounds, the indices of part r are in `[bounds[r], bounds[r+1])`. Parts that arrive here are checked against
        this rank's own range.
        """
        rank, numel = self.comm.rank, self._expected.numel
        ranges = [(0, numel)] * self.comm.size if bounds is None else list(pairwise(bounds))
        packed = [
            Packed(_nothing(), Rounding.none(part))
            if to == rank
            else self.codec.pack(part, self._expected, ranges[to][0])
            for to, part in enumerate(parts)
        ]
        arriving = self._arriving([message for message, _ in packed], parts[rank], ranges[rank])
        return Scattered(vector, [rounding for _, rounding in packed], arriving)

    def _arriving(
        self, messages: Sequence[Tensor], own: SparseVector, allowed: tuple[int, int]
    ) -> Iterator[tuple[int, SparseVector]]:
        with phase("scatter"):
            for source, message in self.comm.all_to_all(messages):
                mine = source == self.comm.rank
                yield source, own if mine else self.codec.unpack(message, self._expected, *allowed, source).vector

    @phase("agree")
    def gather_numbers(self, numbers: Tensor) -> list[Tensor]:
        """A few numbers of each rank, in rank order."""
        return self.comm.all_gather_v(numbers)

    @phase("gather")
    def gather(self, vector: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Gathered:
        """The vectors of all ranks. This rank's vector has no index below `low`; the note is sent with it."""
        packed = self._packed(vector, low, note)
        vectors, notes = [], []
        for source, message in enumerate(self.comm.all_gather_v(packed.message)):
            decoded, arrived = packed.rounding.decoded, note
            if source != self.comm.rank:
                decoded, arrived = self.codec.unpack(message, self._expected, 0, vector.numel, source)
            if note.size and not arrived.size:
                raise MessageError(f"rank {self.comm.rank}: the message of rank {source} has no note")
            vectors.append(decoded)
            notes.append(arrived)
        return Gathered(vectors, notes)

    def gather_blocks(self, block: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Gathered:
        """`gather` blocks whose indices increase from rank to rank, so that they can be joined to one vector."""
        gathered = self.gather(block, low, note)
        self.check_order(gathered.vectors)
        return gathered

    @phase("send")
    def send(self, vector: SparseVector, to: int) -> None:
        """Send a vector to a rank that calls `receive`."""
        self.comm.send_recv(self._packed(vector).message, to, None)

    @phase("receive")
    def receive(self, source: int) -> SparseVector:
        """Receive a vector from a rank that calls `send`."""
        return self._unpacked(_received(self.comm.send_recv(_nothing(), None, source)), source)

    @phase("swap")
    def swap(self, vector: SparseVector, to: int, source: int) -> SparseVector:
        """Send a vector to one rank while receiving one from another."""
        return self._unpacked(_received(self.comm.send_recv(self._packed(vector).message, to, source)), source)

    @phase("pass down")
    def pass_down(self, vector: SparseVector, parent: int | None, children: Sequence[int]) -> SparseVector:
        """The root's vector, passed from parents to children unchanged: encoding it again could round it again."""
        if parent is None:
            wrapped = self.wrap(vector)
        else:
            message = _received(self.comm.send_recv(_nothing(), None, parent))
            wrapped = Wrapped(message, self._unpacked(message, parent))
        for child in children:
            self.comm.send_recv(wrapped.message, child, None)
        return wrapped.vector

    def wrap(self, vector: SparseVector) -> Wrapped:
        """Encode a vector once, to be passed from rank to rank unchanged."""
        message, rounding = self._packed(vector)
        return Wrapped(message, rounding.decoded)

    @phase("swap")
    def swap_wrapped(self, wrapped: Sequence[Wrapped], to: int, source: int) -> list[Wrapped]:
        """Send wrapped vectors to one rank while receiving as many from another, in one message."""
        sizes = torch.tensor([each.message.numel() for each in wrapped], dtype=torch.int64)
        joined = _joined([sizes.view(torch.uint8), *(each.message for each in wrapped)])
        arrived = _received(self.comm.send_recv(joined, to, source))
        parts = self._parted(arrived, len(wrapped), source)
        return [Wrapped(part, self._unpacked(part, source)) for part in parts]

    def check_order(self, blocks: Sequence[SparseVector]) -> None:
        """Raise if the blocks of different ranks overlap: joined, they would not be a vector."""
        last = -1
        for rank, block in enumerate(blocks):
            if block.nnz == 0:
                continue
            start, stop = block.extent
            if start <= last:
                raise MessageError(
                    f"rank {self.comm.rank}: the block of rank {rank} begins at index {start}, "
                    f"but earlier blocks end at index {last}"
                )
            last = stop - 1

    def _packed(self, vector: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Packed:
        packed = self.codec.pack(vector, self._expected, low, note)
        if not packed.rounding.exact:
            self._rounding_errors.append(packed.rounding.error)
        return packed

    def _unpacked(self, message: Tensor, source: int) -> SparseVector:
        return self.codec.unpack(message, self._expected, 0, self._expected.numel, source).vector

    def _parted(self, joined: Tensor, count: int, source: int) -> list[Tensor]:
        """Split messages that were sent as one: first their sizes, then the messages."""
        sizes = joined[: 8 * count].view(torch.int64).tolist() if joined.numel() >= 8 * count else [-1]
        if min(sizes, default=0) < 0 or 8 * count + sum(sizes) != joined.numel():
            raise MessageError(
                f"rank {self.comm.rank}: malformed message from rank {source}: "
                f"{joined.numel()} bytes are not {count} messages with their sizes in front"
            )
        return list(torch.split(joined[8 * count :], sizes))


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _received(message: Tensor | None) -> Tensor:
    assert message is not None, "send_recv with a source returns a message"
    return message


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Not `torch.cat`: it starts threads even for short vectors, and then waits for a busy core."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
