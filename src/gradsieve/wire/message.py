"""A sparse vector as one contiguous buffer, and back.

A message is a sequence of little-endian 64-bit words:
1. a header of eight words (see `Header`);
2. the indices (see `indices`);
3. the values (see `values`);
4. a note, which may be empty: a few float32 numbers that travel with the vector;
5. an end mark.

Every message that arrives is checked before it is used: the header against what this rank expects, the length against
the header, the end mark, and every index against its allowed range. Messages are made and read in main memory. A comm
moves them to the device of its backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import MessageError, MismatchError
from gradsieve.kernels import index_dtype
from gradsieve.kernels.bits import num_words
from gradsieve.vector import Rounding, SparseVector
from gradsieve.wire import indices as index_codes
from gradsieve.wire import values as value_codes
from gradsieve.wire.code import ValueCode
from gradsieve.wire.indices import IndexCode

HEADER_WORDS = 8
OVERHEAD_BYTES = 8 * (HEADER_WORDS + 1)

_MAGIC = 0x6753  # "gS"
_VERSION = 4  # raised when an existing code changes. A new code does not raise it: readers refuse unknown codes
_END_MARK = 0x6576656973  # "sieve"
_VALUE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Array = np.ndarray[Any, np.dtype[Any]]


class Header(NamedTuple):
    """The first words of a message: what the receiver needs to read the rest."""

    kind: int  # magic number (2 bytes), version (1 byte), dtype (2 bytes)
    numel: int
    k: int
    low: int  # no index is below this one
    num_entries: int
    index_word: int
    value_word: int
    note_size: int


@dataclass(frozen=True)
class Expected:
    """What all ranks of one reduction agree on. A message with another header is an error."""

    rank: int
    numel: int
    k: int
    dtype: torch.dtype
    device: torch.device


class Packed(NamedTuple):
    """A message, and how it rounds the vector that it was made of."""

    message: Tensor
    rounding: Rounding


class Arrived(NamedTuple):
    """The content of a message."""

    vector: SparseVector
    note: Array  # float32


FAST_SECONDS_PER_BYTE = 1.5e-9
"""Below this the default codec does not compress. Encoding and decoding takes about 7 ns per entry more than copying,
and saves 3.6 bytes per entry at a density of 1 %."""

NO_NOTE: Array = np.empty(0, np.float32)


@dataclass(frozen=True)
class Codec:
    """How the entries of messages are encoded. The default is lossless; with other codes the sender keeps the error.

    Args:
        values: A name of `gradsieve.wire.values.VALUE_CODES`, such as `"bf16"` or `"sign"`.
        indices: A name of `gradsieve.wire.indices.INDEX_CODES`.

    Raises:
        UnknownNameError: If there is no code of that name.

    Example:
        >>> from gradsieve import REDUCERS, Codec
        >>> REDUCERS["oktopk"](codec=Codec(values="bf16")).codec
        Codec(values='bf16', indices='auto')
    """

    values: str = "exact"  # codes with fewer bits send less, and leave a larger rounding error
    indices: str = "auto"  # `auto` takes the smallest code for each message

    def __post_init__(self) -> None:
        value_codes.VALUE_CODES[self.values]
        index_codes.INDEX_CODES[self.indices]

    def for_link(self, seconds_per_byte: float) -> Codec:
        """This codec. The default one does not compress if the network is faster than compression."""
        return PLAIN if self == LOSSLESS and seconds_per_byte < FAST_SECONDS_PER_BYTE else self

    def pack(self, vector: SparseVector, expected: Expected, low: int, note: Array = NO_NOTE) -> Packed:
        """A message with the entries of a vector, all of which have an index of at least `low`."""
        values = _as_array(vector.values)
        index_code = self._index_code(vector, low)
        value_code = value_codes.chosen(self.values, values)
        edges = _edges(index_code, value_code, note.size)
        words = np.empty(edges[-1] + 1, np.uint64)
        words[:HEADER_WORDS].view(np.int64)[:] = np.array(_header(vector, expected, low, index_code, value_code, note))
        if index_code.num_words:
            index_code.write(_indices(vector), low, index_code.cleared(words[edges[0] : edges[1] + 1]))
        rounding = value_code.write_vector(vector, values, value_code.cleared(words[edges[1] : edges[2]]))
        words[edges[2] : edges[3]] = 0
        words[edges[2] : edges[3]].view(np.float32)[: note.size] = note
        words[-1] = _END_MARK
        return Packed(torch.from_numpy(words).view(torch.uint8), rounding)

    def _index_code(self, vector: SparseVector, low: int) -> IndexCode:
        """The indices of a run take no space, so a run is sent as a run whatever the code for other vectors is."""
        if vector.is_run and vector.nnz:
            return index_codes.Run(vector.span[0] - low)
        return index_codes.INDEX_CODES[self.indices](_indices(vector), low)

    def unpack(self, message: Tensor, expected: Expected, low: int, high: int, source: int) -> Arrived:
        """`unpack` a message, which says itself how it is encoded."""
        return unpack(message, expected, low, high, source)


LOSSLESS = Codec()
PLAIN = Codec("plain", "plain")


def unpack(message: Tensor, expected: Expected, low: int, high: int, source: int) -> Arrived:
    """The content of a message, whose indices must be in `[low, high)`."""
    return _Reader(message, expected, source).read(low, high)


class _Reader:
    def __init__(self, message: Tensor, expected: Expected, source: int) -> None:
        self.num_bytes = message.numel()
        self.expected = expected
        self.source = source
        if self.num_bytes < OVERHEAD_BYTES or self.num_bytes % 8:
            raise self.malformed(f"{self.num_bytes} bytes are not whole words of 8, or less than {OVERHEAD_BYTES}")
        data = message.cpu().numpy()
        self.words: Array = (data if data.ctypes.data % 8 == 0 else data.copy()).view(np.uint64)
        self.header = Header(*self.words[:HEADER_WORDS].view(np.int64).tolist())

    def read(self, low: int, high: int) -> Arrived:
        self.check_header()
        index_code, value_code = self.codes(low, high)
        edges = _edges(index_code, value_code, self.header.note_size)
        if 8 * (edges[-1] + 1) != self.num_bytes:
            raise self.malformed(f"{self.num_bytes} bytes arrived, but the header announces {8 * (edges[-1] + 1)}")
        if self.words[-1] != _END_MARK:
            raise self.malformed(f"it ends with {int(self.words[-1]):#x}, not with the end mark")
        vector = self.vector(index_code, value_code, edges, high)
        return Arrived(vector, self.words[edges[2] : edges[3]].view(np.float32)[: self.header.note_size])

    def check_header(self) -> None:
        header, expected = self.header, self.expected
        magic, version, dtype = header.kind >> 24, header.kind >> 16 & 0xFF, header.kind & 0xFFFF
        if magic != _MAGIC or dtype >= len(_VALUE_DTYPES):
            raise self.malformed(f"unknown header {header.kind:#x}")
        if version != _VERSION:
            raise self.differs("the wire version", version, _VERSION)
        if _VALUE_DTYPES[dtype] != expected.dtype:
            raise self.differs("the dtype", _VALUE_DTYPES[dtype], expected.dtype)
        if header.numel != expected.numel:
            raise self.differs("numel", header.numel, expected.numel)
        if header.k != expected.k:
            raise self.differs("k", header.k, expected.k)
        if not 0 <= header.num_entries <= header.numel:
            raise self.malformed(f"the header announces {header.num_entries} entries, allowed are 0 to {header.numel}")
        if not 0 <= header.note_size <= self.num_bytes // 4:
            raise self.malformed(f"the header announces a note of {header.note_size} numbers")

    def codes(self, low: int, high: int) -> tuple[IndexCode, ValueCode]:
        header, expected = self.header, self.expected
        if not low <= header.low <= high:
            raise self.malformed(f"its indices begin at {header.low}, but must be in [{low}, {high})")
        itemsize = index_dtype(header.numel).itemsize
        index_code = index_codes.from_word(header.index_word, header.num_entries, itemsize, high - header.low)
        if index_code is None:
            raise self.malformed(f"unknown index code {header.index_word:#x}")
        value_code = value_codes.from_word(header.value_word, header.num_entries, expected.dtype.itemsize)
        if value_code is None:
            raise self.malformed(f"unknown value code {header.value_word:#x}")
        return index_code, value_code

    def vector(self, index_code: IndexCode, value_code: ValueCode, edges: list[int], high: int) -> SparseVector:
        header, device = self.header, self.expected.device
        if isinstance(index_code, index_codes.Run):
            return self.run(index_code, value_code, edges, high)
        words, integer = self.words[edges[0] : edges[1] + 1], np.dtype(f"i{index_dtype(header.numel).itemsize}")
        indices = index_code.decoded(words, header.low, high, header.num_entries, integer)
        if indices is None:
            raise self.disordered(high)
        return SparseVector.trusted(
            (torch.from_numpy(indices).to(device), self.values(value_code, edges)), header.numel
        )

    def run(self, index_code: index_codes.Run, value_code: ValueCode, edges: list[int], high: int) -> SparseVector:
        header, expected = self.header, self.expected
        if not index_code.fits(header.low, high, header.num_entries):
            raise self.disordered(high)
        start = header.low + index_code.start
        if expected.dtype == torch.float32 and expected.device.type == "cpu":
            undecoded = value_code.undecoded(self.words[edges[1] : edges[2] + 1], start, header.numel)
            if undecoded is not None:
                return undecoded
        return SparseVector.run(self.values(value_code, edges), start, header.numel)

    def values(self, value_code: ValueCode, edges: list[int]) -> Tensor:
        decoded = value_code.read(self.words[edges[1] : edges[2] + 1], _array_dtype(self.expected.dtype))
        return torch.from_numpy(decoded).view(self.expected.dtype).to(self.expected.device)

    def disordered(self, high: int) -> MessageError:
        return self.malformed(f"its indices are not strictly increasing in [{self.header.low}, {high})")

    def malformed(self, what: str) -> MessageError:
        return MessageError(f"rank {self.expected.rank}: malformed message from rank {self.source}: {what}")

    def differs(self, what: str, theirs: object, mine: object) -> MismatchError:
        return MismatchError(
            f"rank {self.expected.rank}: {what} must be the same on all ranks, "
            f"but is {theirs} on rank {self.source} and {mine} here"
        )


def _edges(index_code: IndexCode, value_code: ValueCode, note_size: int) -> list[int]:
    """The word after the header, the indices, the values and the note."""
    return list(accumulate([HEADER_WORDS, index_code.num_words, value_code.num_words, num_words(32 * note_size)]))


def _header(
    vector: SparseVector, expected: Expected, low: int, index_code: IndexCode, value_code: ValueCode, note: Array
) -> Header:
    kind = _MAGIC << 24 | _VERSION << 16 | _VALUE_DTYPES.index(vector.values.dtype)
    return Header(kind, expected.numel, expected.k, low, vector.nnz, index_code.word, value_code.word, note.size)


def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy has no bfloat16: half precision is handled as integers with the same bits."""
    return np.dtype({torch.float32: np.float32, torch.float64: np.float64}.get(dtype, np.int16))


def _indices(vector: SparseVector) -> Array:
    array: Array = vector.indices.cpu().numpy()
    return array


def _as_array(values: Tensor) -> Array:
    wide = values.dtype in (torch.float32, torch.float64)
    array: Array = (values if wide else values.view(torch.int16)).cpu().numpy()
    return array
