"""Sparse vectors between the ranks of one reduction: the layer at which reducers are written.

A channel may round the values it sends. Whoever receives sees rounded values, and so does the sender where it needs to
know. The difference stays with the sender: of what was scattered it is for the reducer to say, since that depends on
what becomes of it; of everything else it is collected here, and becomes leftover.
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
from gradsieve.vector import SparseVector, add
from gradsieve.wire.message import NO_NOTE, Array, Codec, Expected, Packed


class Gathered(NamedTuple):
    """Everybody's vector as all ranks see it, and everybody's note, in rank order."""

    vectors: list[SparseVector]
    notes: list[Array]


class Scattered(NamedTuple):
    """Parts on their way to their owners."""

    vector: SparseVector  # whose parts they are
    parts: Sequence[SparseVector]
    seen: Sequence[SparseVector]  # the parts as the receivers decode them, this rank's own as it is
    arriving: Iterator[tuple[int, SparseVector]]  # (source, part), one's own first; to be consumed to the end

    @property
    def sent(self) -> SparseVector:
        """The whole vector as the receivers decode it; the vector itself if nothing was rounded."""
        if all(seen is part for seen, part in zip(self.seen, self.parts, strict=True)):
            return self.vector
        return self.vector.with_values([seen.values for seen in self.seen])

    @property
    def rounding_errors(self) -> list[SparseVector]:
        """Of each part, the difference between what was sent and what the receiver decodes."""
        return [part.beyond(seen) for part, seen in zip(self.parts, self.seen, strict=True)]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A peer that is lost in here was lost in this phase."""
    try:
        yield
    except PeerLostError as error:
        error.phase = error.phase or name
        raise


class Channel:
    """A comm that carries the sparse vectors of one step, all like `local`, reduced with the same `k`."""

    def __init__(self, comm: Comm, local: SparseVector, k: int, codec: Codec) -> None:
        self.comm = comm
        self.codec = codec.for_link(comm.seconds_per_byte)
        self._rounded_away: list[SparseVector] = []
        self._like = local
        self._expected = Expected(comm.rank, local.numel, k, local.values.dtype, local.values.device)

    def leftover(self) -> SparseVector:
        """All that was rounded away so far, but for what was scattered."""
        if self._rounded_away:
            return add(self._rounded_away)
        return SparseVector.empty(self._like.numel, self._like.values)

    def keep(self, rounded_away: SparseVector) -> None:
        """Add to the leftover."""
        self._rounded_away.append(rounded_away)

    def scatter(
        self, vector: SparseVector, parts: Sequence[SparseVector], bounds: Sequence[int] | None = None
    ) -> Scattered:
        """Send part r of a vector to rank r.

        With bounds, part r lies in `[bounds[r], bounds[r+1])` and so must what arrives here in this rank's own range.
        """
        rank, numel = self.comm.rank, self._expected.numel
        ranges = [(0, numel)] * self.comm.size if bounds is None else list(pairwise(bounds))
        packed = [
            Packed(_nothing(), part) if to == rank else self.codec.pack(part, self._expected, ranges[to][0])
            for to, part in enumerate(parts)
        ]
        arriving = self._arriving([message for message, _ in packed], parts[rank], ranges[rank])
        return Scattered(vector, parts, [seen for _, seen in packed], arriving)

    def _arriving(
        self, messages: Sequence[Tensor], own: SparseVector, allowed: tuple[int, int]
    ) -> Iterator[tuple[int, SparseVector]]:
        with phase("scatter"):
            for source, message in self.comm.exchange(messages):
                mine = source == self.comm.rank
                yield source, own if mine else self.codec.unpack(message, self._expected, *allowed, source).vector

    @phase("agree")
    def told_by_all(self, numbers: Tensor) -> list[Tensor]:
        """Everybody's few numbers, in rank order."""
        return self.comm.all_gather_v(numbers)

    @phase("gather")
    def gather(self, vector: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Gathered:
        """Everybody's vector. This rank's has no index below `low`; the note is a few numbers to go with it."""
        packed = self._packed(vector, low, note)
        vectors, notes = [], []
        for source, message in enumerate(self.comm.all_gather_v(packed.message)):
            mine = source == self.comm.rank
            seen, told = (
                (packed.seen, note) if mine else self.codec.unpack(message, self._expected, 0, vector.numel, source)
            )
            if note.size and not told.size:
                raise MessageError(f"rank {self.comm.rank}: the message of rank {source} has no note")
            vectors.append(seen)
            notes.append(told)
        return Gathered(vectors, notes)

    def gather_blocks(self, block: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Gathered:
        """`gather` for blocks whose indices follow each other from rank to rank; joined, they are one vector."""
        gathered = self.gather(block, low, note)
        self.check_order(gathered.vectors)
        return gathered

    @phase("send")
    def send(self, vector: SparseVector, to: int) -> None:
        """Send a vector to one rank, who receives."""
        self.comm.send_recv(self._packed(vector).message, to, None)

    @phase("receive")
    def receive(self, source: int) -> SparseVector:
        """Receive a vector from one rank, who sends."""
        return self._unpacked(self.comm.send_recv(_nothing(), None, source), source)

    @phase("swap")
    def swap(self, vector: SparseVector, to: int, source: int) -> SparseVector:
        """Send a vector to one rank while receiving one from another."""
        return self._unpacked(self.comm.send_recv(self._packed(vector).message, to, source), source)

    @phase("pass down")
    def pass_down(self, vector: SparseVector, parent: int | None, children: Sequence[int]) -> SparseVector:
        """The root's vector, handed on from parents to children as it is: rounding it again would change it."""
        if parent is None:
            packed = self._packed(vector)
        else:
            message = self.comm.send_recv(_nothing(), None, parent)
            packed = Packed(_sent(message), self._unpacked(message, parent))
        for child in children:
            self.comm.send_recv(packed.message, child, None)
        return packed.seen

    def wrap(self, vector: SparseVector) -> Packed:
        """A vector ready to be handed from rank to rank as it is."""
        return self._packed(vector)

    @phase("swap")
    def swap_wrapped(self, wrapped: Sequence[Packed], to: int, source: int) -> list[Packed]:
        """Send wrapped vectors to one rank while receiving as many from another, in one message."""
        sizes = torch.tensor([packed.message.numel() for packed in wrapped], dtype=torch.int64)
        joined = _joined([sizes.view(torch.uint8), *(packed.message for packed in wrapped)])
        arrived = _sent(self.comm.send_recv(joined, to, source))
        parts = self._parted(arrived, len(wrapped), source)
        return [Packed(part, self._unpacked(part, source)) for part in parts]

    def check_order(self, blocks: Sequence[SparseVector]) -> None:
        """Blocks of several ranks must not overlap, or their join would not be a vector."""
        last = -1
        for rank, block in enumerate(blocks):
            if block.nnz == 0:
                continue
            start, stop = block.extent
            if start <= last:
                raise MessageError(
                    f"rank {self.comm.rank}: the block of rank {rank} begins at index {start}, "
                    f"but earlier blocks reach to {last}"
                )
            last = stop - 1

    def _packed(self, vector: SparseVector, low: int = 0, note: Array = NO_NOTE) -> Packed:
        packed = self.codec.pack(vector, self._expected, low, note)
        if packed.seen is not vector:
            self._rounded_away.append(vector.beyond(packed.seen))
        return packed

    def _unpacked(self, message: Tensor | None, source: int) -> SparseVector:
        return self.codec.unpack(_sent(message), self._expected, 0, self._expected.numel, source).vector

    def _parted(self, joined: Tensor, count: int, source: int) -> list[Tensor]:
        """Messages that came as one: their sizes, then themselves."""
        sizes = joined[: 8 * count].view(torch.int64).tolist() if joined.numel() >= 8 * count else [-1]
        if min(sizes, default=0) < 0 or 8 * count + sum(sizes) != joined.numel():
            raise MessageError(
                f"rank {self.comm.rank}: malformed message from rank {source}: "
                f"{joined.numel()} bytes are no {count} messages"
            )
        return list(torch.split(joined[8 * count :], sizes))


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _sent(message: Tensor | None) -> Tensor:
    assert message is not None, "a comm returns what was received"
    return message


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Not by `torch.cat`, which shares out even short vectors and then waits for a busy core."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
