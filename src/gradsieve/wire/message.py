"""A sparse vector as one contiguous buffer, and back.

A message is a header of five 64-bit words, then the entries. Two layouts, the smaller is taken: `pairs` has values and
indices, `range` has the values of a whole index range. There +0 means no entry; an entry whose value is zero (a sum
that cancelled) travels as -0, so that both layouts give back exactly the entries that were sent.

Everything that arrives is checked against the header, the header against what this rank expects, and every index
against the range it may lie in, before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradsieve.errors import MessageError, MismatchError
from gradsieve.kernels import index_dtype, kernels
from gradsieve.vector import SparseVector

HEADER_WORDS = 5
HEADER_BYTES = 8 * HEADER_WORDS

_MAGIC = 0x6753  # "gS"
_VERSION = 1
_PAIRS, _RANGE = 0, 1
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

T = TypeVar("T", Tensor, torch.dtype)


class Header(NamedTuple):
    """What the receiver must know to read the rest."""

    kind: int  # magic, version, layout, dtype: one byte each but the first
    numel: int
    k: int
    low: int  # first index of a range
    num_entries: int


@dataclass(frozen=True)
class Expected:
    """What the ranks of one reduction agree on; a message that says otherwise is an error."""

    rank: int
    numel: int
    k: int


def pack(vector: SparseVector, expected: Expected, low: int, high: int) -> Tensor:
    """A message with the entries of a vector, all of which lie in `[low, high)`."""
    values = vector.values
    pair_bytes = values.element_size() + index_dtype(vector.numel).itemsize
    if (high - low) * values.element_size() < vector.nnz * pair_bytes:
        dense = torch.zeros(high - low, dtype=values.dtype, device=values.device)
        dense[vector.indices - low] = torch.where(values == 0, -0.0, values)
        return _join(_header(_RANGE, dense, expected, low), dense)
    return _join(_header(_PAIRS, values, expected, low), *_widest_first(vector.indices, values))


def unpack(message: Tensor, expected: Expected, low: int, high: int, source: int) -> SparseVector:
    """The vector a message holds; its indices lie in `[low, high)`."""
    reader = _Reader(message, expected, source)
    layout, dtype, header = reader.header()
    if layout == _RANGE:
        return reader.range(dtype, header, low, high)
    return reader.pairs(dtype, header, low, high)


class _Reader:
    def __init__(self, message: Tensor, expected: Expected, source: int) -> None:
        self.message = message
        self.expected = expected
        self.source = source

    def header(self) -> tuple[int, torch.dtype, Header]:
        if self.message.numel() < HEADER_BYTES:
            raise self.malformed(f"{self.message.numel()} bytes are no message")
        header = Header(*self.message[:HEADER_BYTES].view(torch.int64).tolist())
        magic, version = header.kind >> 24, header.kind >> 16 & 0xFF
        layout, dtype = header.kind >> 8 & 0xFF, header.kind & 0xFF
        if magic != _MAGIC or layout > _RANGE or dtype >= len(_VALUE_DTYPES):
            raise self.malformed(f"unknown header {header.kind:#x}")
        if version != _VERSION:
            raise self.differs("the wire version", version, _VERSION)
        if header.numel != self.expected.numel:
            raise self.differs("numel", header.numel, self.expected.numel)
        if header.k != self.expected.k:
            raise self.differs("k", header.k, self.expected.k)
        if not 0 <= header.num_entries <= header.numel:
            raise self.malformed(f"{header.num_entries} entries announced, at most {header.numel} are possible")
        return layout, _VALUE_DTYPES[dtype], header

    def pairs(self, dtype: torch.dtype, header: Header, low: int, high: int) -> SparseVector:
        kinds = _widest_first(index_dtype(header.numel), dtype)
        first, second = self.arrays(*((kind, header.num_entries) for kind in kinds))
        indices, values = (second, first) if kinds[0] is dtype else (first, second)
        position = kernels(values).first_disorder(indices, low, high)
        if position >= 0:
            raise self.malformed(
                f"index {int(indices[position])} at position {position}, "
                f"indices must be strictly increasing in [{low}, {high})"
            )
        return SparseVector.trusted((indices, values), header.numel)

    def range(self, dtype: torch.dtype, header: Header, low: int, high: int) -> SparseVector:
        if header.low < low or header.low + header.num_entries > high:
            raise self.malformed(
                f"range [{header.low}, {header.low + header.num_entries}) is not within [{low}, {high})"
            )
        (values,) = self.arrays((dtype, header.num_entries))
        positions = values.view(_BITS[dtype.itemsize]).nonzero().flatten()
        indices = (positions + header.low).to(index_dtype(header.numel))
        return SparseVector.trusted((indices, values[positions] + 0.0), header.numel)

    def arrays(self, *kinds: tuple[torch.dtype, int]) -> list[Tensor]:
        """The parts after the header, as views; their lengths must fill the message exactly."""
        sizes = [dtype.itemsize * count for dtype, count in kinds]
        if HEADER_BYTES + sum(sizes) != self.message.numel():
            raise self.malformed(f"{self.message.numel()} bytes came, {HEADER_BYTES + sum(sizes)} were announced")
        parts = torch.split(self.message[HEADER_BYTES:], sizes)
        return [part.view(dtype) for part, (dtype, _) in zip(parts, kinds, strict=True)]

    def malformed(self, what: str) -> MessageError:
        return MessageError(f"rank {self.expected.rank}: malformed message from rank {self.source}: {what}")

    def differs(self, what: str, theirs: int, mine: int) -> MismatchError:
        return MismatchError(
            f"rank {self.expected.rank}: {what} must be the same on all ranks, "
            f"but is {theirs} on rank {self.source} and {mine} here"
        )


def _header(layout: int, values: Tensor, expected: Expected, low: int) -> Tensor:
    kind = _MAGIC << 24 | _VERSION << 16 | layout << 8 | _VALUE_DTYPES.index(values.dtype)
    header = Header(kind, expected.numel, expected.k, low, values.numel())
    return torch.tensor(header, dtype=torch.int64, device=values.device)


def _join(*parts: Tensor) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts])


def _widest_first(indices: T, values: T) -> tuple[T, T]:
    """Wider words first, so that both arrays are aligned after the header whatever their length."""
    return (values, indices) if values.itemsize >= indices.itemsize else (indices, values)
