"""A sparse vector as one contiguous buffer, and back.

A message is a header of six 64-bit words, then the entries. Two layouts, the smaller is taken: `pairs` has indices (see
`indices`) and values, `range` has the values of a whole index range. There +0 means no entry; an entry whose value is
zero (a sum that cancelled) travels as -0, so that both layouts give back exactly the entries that were sent.

Everything that arrives is checked against the header, the header against what this rank expects, and every index
against the range it may lie in, before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import MessageError, MismatchError
from gradsieve.kernels import index_dtype
from gradsieve.vector import SparseVector
from gradsieve.wire.indices import IndexCode

HEADER_WORDS = 6
HEADER_BYTES = 8 * HEADER_WORDS

_MAGIC = 0x6753  # "gS"
_VERSION = 1
_PAIRS, _RANGE = 0, 1
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Header(NamedTuple):
    """What the receiver must know to read the rest."""

    kind: int  # magic, version, layout, dtype: one byte each but the first
    numel: int
    k: int
    low: int  # of the range that the entries lie in
    num_entries: int
    index_code: int


@dataclass(frozen=True)
class Expected:
    """What the ranks of one reduction agree on; a message that says otherwise is an error."""

    rank: int
    numel: int
    k: int


def pack(vector: SparseVector, expected: Expected, low: int, high: int) -> Tensor:
    """A message with the entries of a vector, all of which lie in `[low, high)`."""
    values = vector.values
    code = IndexCode.smallest(vector.indices, low)
    if (high - low) * values.element_size() < code.num_bytes + vector.nnz * values.element_size():
        dense = torch.zeros(high - low, dtype=values.dtype, device=values.device)
        dense[vector.indices - low] = torch.where(values == 0, -0.0, values)
        return _join(_header(_RANGE, dense, expected, low, 0), dense)
    return _join(_header(_PAIRS, values, expected, low, code.word), code.write(vector.indices, low), values)


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
        code = IndexCode.from_word(header.index_code, header.num_entries, header.numel)
        if code is None or not low <= header.low <= high:
            raise self.malformed(f"unknown index code {header.index_code:#x} from {header.low}")
        packed, values = self.parts(code.num_bytes, header.num_entries * dtype.itemsize)
        indices = code.read(packed, header.numel, header.low, high)
        if isinstance(indices, str):
            raise self.malformed(indices)
        return SparseVector.trusted((indices, values.view(dtype)), header.numel)

    def range(self, dtype: torch.dtype, header: Header, low: int, high: int) -> SparseVector:
        if header.low < low or header.low + header.num_entries > high:
            raise self.malformed(
                f"range [{header.low}, {header.low + header.num_entries}) is not within [{low}, {high})"
            )
        (data,) = self.parts(header.num_entries * dtype.itemsize)
        values = data.view(dtype)
        positions = values.view(_BITS[dtype.itemsize]).nonzero().flatten()
        indices = (positions + header.low).to(index_dtype(header.numel))
        return SparseVector.trusted((indices, values[positions] + 0.0), header.numel)

    def parts(self, *sizes: int) -> tuple[Tensor, ...]:
        """What follows the header, as views; the sizes must fill the message exactly."""
        announced = HEADER_BYTES + sum(sizes)
        if announced != self.message.numel():
            raise self.malformed(f"{self.message.numel()} bytes came, {announced} were announced")
        return torch.split(self.message[HEADER_BYTES:], list(sizes))

    def malformed(self, what: str) -> MessageError:
        return MessageError(f"rank {self.expected.rank}: malformed message from rank {self.source}: {what}")

    def differs(self, what: str, theirs: int, mine: int) -> MismatchError:
        return MismatchError(
            f"rank {self.expected.rank}: {what} must be the same on all ranks, "
            f"but is {theirs} on rank {self.source} and {mine} here"
        )


def _header(layout: int, values: Tensor, expected: Expected, low: int, index_code: int) -> Tensor:
    kind = _MAGIC << 24 | _VERSION << 16 | layout << 8 | _VALUE_DTYPES.index(values.dtype)
    header = Header(kind, expected.numel, expected.k, low, values.numel(), index_code)
    return torch.tensor(header, dtype=torch.int64, device=values.device)


def _join(*parts: Tensor) -> Tensor:
    data = [part.view(torch.uint8) for part in parts]
    if data[0].device.type == "cpu":  # `torch.cat` shares out even short vectors and then waits for a busy core
        return torch.from_numpy(np.concatenate([part.numpy() for part in data]))
    return torch.cat(data)
