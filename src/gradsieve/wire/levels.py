"""Values rounded to a few levels that a chunk of values shares.

Whole numbers of 8, 4 or 1 bits times a step, or with 2 bits a sign and one of two magnitudes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from gradsieve.kernels import fields, signs, twobits
from gradsieve.kernels.bits import num_words
from gradsieve.vector import SparseVector
from gradsieve.wire.code import Array, ValueCode
from gradsieve.wire.signed import Signed


@dataclass(frozen=True)
class Stepped(ValueCode):
    """Small whole numbers times a step that a chunk of values shares: the steps, then the numbers."""

    bits: ClassVar[int]
    chunk_values: ClassVar[int] = fields.CHUNK_VALUES
    count: int

    @property
    def num_chunks(self) -> int:
        """How many steps there are."""
        return -(-self.count // self.chunk_values)

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(32 * self.num_chunks) + num_words(self.bits * self.count)

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        steps, room = self._parts(words)
        codes, rounded = np.empty(self.count, np.int8), np.empty(self.count, np.float32)
        self.encode(values.astype(np.float32, copy=False), steps, codes, rounded)
        self.pack(codes, room)
        return rounded.astype(values.dtype, copy=False)

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        steps, room = self._parts(words)
        values = np.empty(self.count, np.float32)
        fields.decode_levels(steps, self.unpacked(room), values)
        return values.astype(dtype, copy=False)

    def _parts(self, words: Array) -> tuple[Array, Array]:
        edge = num_words(32 * self.num_chunks)
        return words[:edge].view(np.float32)[: self.num_chunks], words[edge:].view(np.uint8)

    def encode(self, values: Array, steps: Array, codes: Array, rounded: Array) -> None:
        """Find steps and numbers."""
        fields.encode_levels(values, values.view(np.uint32), (1 << (self.bits - 1)) - 1, steps, codes, rounded)

    def pack(self, codes: Array, data: Array) -> None:
        """Numbers as bytes."""
        data[: codes.size] = codes.view(np.uint8)

    def unpacked(self, data: Array) -> Array:
        """Bytes as numbers."""
        return data.view(np.int8)[: self.count]


@dataclass(frozen=True)
class Byte(Stepped):
    """-127 to 127."""

    kind: ClassVar[int] = 4
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Nibble(Stepped):
    """-7 to 7, two in a byte."""

    kind: ClassVar[int] = 5
    bits: ClassVar[int] = 4

    def pack(self, codes: Array, data: Array) -> None:
        """See `Stepped.pack`."""
        fields.pack_nibbles(codes, data)

    def unpacked(self, data: Array) -> Array:
        """See `Stepped.unpacked`."""
        codes = np.empty(self.count, np.int8)
        fields.unpack_nibbles(data, codes)
        return codes


@dataclass(frozen=True)
class Encoded(Stepped):
    """Codes that are encoded when they are chosen.

    Whether all values are finite comes out of the one pass that encodes them. Writing is a copy of the words.
    """

    encoded: Array | None = field(default=None, compare=False, repr=False)  # all words

    @classmethod
    def fitting(cls, values: Array) -> Self | None:
        """The code of these values; None if one of them is not finite as float32, or has not that many bits."""
        if values.itemsize < 4:
            return None
        with np.errstate(over="ignore"):  # too large a one is infinite then
            singles = values.astype(np.float32, copy=False)
        code = cls(values.size)
        words = np.zeros(code.num_words, np.uint64)
        return cls(values.size, words) if code.encode_all(singles, words) else None

    @abstractmethod
    def encode_all(self, values: Array, words: Array) -> bool:
        """Fill all words from float32 values; false if one of them is not finite."""

    @abstractmethod
    def decode_all(self, words: Array, values: Array) -> None:
        """Fill float32 values from the words."""

    def cleared(self, words: Array) -> Array:
        """See `Code.cleared`: all words are written over."""
        return words

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        assert self.encoded is not None, "a code that is written is made by `fitting`"
        words[:] = self.encoded
        return self.read(words, values.dtype)

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        values = np.empty(self.count, np.float32)
        self.decode_all(words, values)
        return values.astype(dtype, copy=False)


@dataclass(frozen=True)
class Sign(Encoded):
    """-1 or 1."""

    kind: ClassVar[int] = 6
    bits: ClassVar[int] = 1
    chunk_values: ClassVar[int] = signs.CHUNK_VALUES

    def encode_all(self, values: Array, words: Array) -> bool:
        """See `Encoded.encode_all`."""
        return bool(signs.encode(values, *self._steps_and_masks(words)))

    def decode_all(self, words: Array, values: Array) -> None:
        """See `Encoded.decode_all`."""
        signs.decode(*self._steps_and_masks(words), values)

    def write_vector(self, vector: SparseVector, values: Array, words: Array) -> SparseVector:
        """See `ValueCode.write_vector`."""
        if not vector.is_run or values.dtype != np.float32 or vector.values.device.type != "cpu":
            return super().write_vector(vector, values, words)
        words[:] = self.encoded
        return self.undecoded(words, vector.span[0], vector.numel)

    def undecoded(self, words: Array, start: int, numel: int) -> SparseVector:
        """See `ValueCode.undecoded`."""
        return Signed(*self._steps_and_masks(words), self.count, start, numel)

    def _steps_and_masks(self, words: Array) -> tuple[Array, Array]:
        steps, room = self._parts(words)
        return steps, room.view(np.uint32)


@dataclass(frozen=True)
class Bit(Sign):
    """-1 or 1 times one step for all values of a message: their mean magnitude.

    In memory the step is repeated for every chunk, so that all that reads signs reads these.
    """

    kind: ClassVar[int] = 7

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(32) + num_words(self.bits * self.count)

    @classmethod
    def fitting(cls, values: Array) -> Self | None:
        """See `Encoded.fitting`."""
        chunked = Sign.fitting(values)
        if chunked is None or chunked.encoded is None:
            return None
        steps, masks = chunked._steps_and_masks(chunked.encoded)
        counts = np.full(steps.size, cls.chunk_values)
        counts[-1] = values.size - cls.chunk_values * (steps.size - 1)
        words = np.zeros(cls(values.size).num_words, np.uint64)
        words[:1].view(np.float32)[0] = np.dot(steps.astype(np.float64), counts) / values.size
        words[1:].view(np.uint32)[:] = masks
        return cls(values.size, words)

    def _steps_and_masks(self, words: Array) -> tuple[Array, Array]:
        return np.full(self.num_chunks, words[:1].view(np.float32)[0]), words[1 : self.num_words].view(np.uint32)


@dataclass(frozen=True)
class TwoBit(Encoded):
    """A sign and one of two magnitudes that a chunk of values shares: the pairs of magnitudes, then the codes."""

    kind: ClassVar[int] = 8
    bits: ClassVar[int] = 2
    chunk_values: ClassVar[int] = twobits.CHUNK_VALUES

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return self.num_chunks + num_words(self.bits * self.count)

    def encode_all(self, values: Array, words: Array) -> bool:
        """See `Encoded.encode_all`."""
        return bool(twobits.encode(values, *self._parts(words)))

    def decode_all(self, words: Array, values: Array) -> None:
        """See `Encoded.decode_all`."""
        twobits.decode(*self._parts(words), values)

    def _parts(self, words: Array) -> tuple[Array, Array]:
        return words[: self.num_chunks].view(np.float32), words[self.num_chunks :]
