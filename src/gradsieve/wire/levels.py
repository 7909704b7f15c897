"""Values rounded to a few levels that a chunk of values shares.

With 8, 4 or 1 bits per value: a whole number times the chunk's step. With 2 bits: a sign and one of two magnitudes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from typing_extensions import override

from gradsieve.kernels import fields, signs, twobits
from gradsieve.kernels.bits import num_words
from gradsieve.vector import Rounding, SparseVector
from gradsieve.wire.code import Array, ValueCode
from gradsieve.wire.signed import Signed

NO_WORDS: Array = np.empty(0, np.uint64)


@dataclass(frozen=True)
class Stepped(ValueCode):
    """Small whole numbers times a step that a chunk of values shares. Written as all steps, then all numbers."""

    bits: ClassVar[int]
    chunk_values: ClassVar[int] = fields.CHUNK_VALUES
    count: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks, and so of steps."""
        return -(-self.count // self.chunk_values)

    @property
    @override
    def num_words(self) -> int:
        return num_words(32 * self.num_chunks) + num_words(self.bits * self.count)

    @override
    def write(self, values: Array, words: Array) -> Array:
        steps, room = self._parts(words)
        codes, rounded = np.empty(self.count, np.int8), np.empty(self.count, np.float32)
        self.encode(values.astype(np.float32, copy=False), steps, codes, rounded)
        self.pack(codes, room)
        return rounded.astype(values.dtype, copy=False)

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        steps, room = self._parts(words)
        values = np.empty(self.count, np.float32)
        fields.decode_levels(steps, self.unpacked(room), values)
        return values.astype(dtype, copy=False)

    def _parts(self, words: Array) -> tuple[Array, Array]:
        edge = num_words(32 * self.num_chunks)
        return words[:edge].view(np.float32)[: self.num_chunks], words[edge:].view(np.uint8)

    def encode(self, values: Array, steps: Array, codes: Array, rounded: Array) -> None:
        """Fill steps, numbers and the values they decode to."""
        fields.encode_levels(values, values.view(np.uint32), (1 << (self.bits - 1)) - 1, steps, codes, rounded)

    def pack(self, codes: Array, data: Array) -> None:
        """Write numbers to bytes."""
        data[: codes.size] = codes.view(np.uint8)

    def unpacked(self, data: Array) -> Array:
        """Read numbers from bytes."""
        return data.view(np.int8)[: self.count]


@dataclass(frozen=True)
class Byte(Stepped):
    """Numbers from -127 to 127."""

    kind: ClassVar[int] = 4
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Nibble(Stepped):
    """Numbers from -7 to 7, two per byte."""

    kind: ClassVar[int] = 5
    bits: ClassVar[int] = 4

    @override
    def pack(self, codes: Array, data: Array) -> None:
        fields.pack_nibbles(codes, data)

    @override
    def unpacked(self, data: Array) -> Array:
        codes = np.empty(self.count, np.int8)
        fields.unpack_nibbles(data, codes)
        return codes


@dataclass(frozen=True)
class Encoded(Stepped):
    """Base of codes that encode the values when the code is chosen.

    A message can use such a code only if all values are finite, and the pass that encodes them finds that out. Writing
    the message then copies the encoded words.
    """

    encoded: Array = field(default_factory=lambda: NO_WORDS, compare=False, repr=False)  # none when a message is read

    @classmethod
    def fitting(cls, values: Array) -> Self | None:
        """The code of these values; None if one of them is not finite as float32, or if they are half precision."""
        if values.itemsize < 4:
            return None
        with np.errstate(over="ignore"):  # values that float32 cannot hold become infinite
            singles = values.astype(np.float32, copy=False)
        code = cls(values.size)
        words = np.zeros(code.num_words, np.uint64)
        return cls(values.size, words) if code.encode_all(singles, words) else None

    @abstractmethod
    def encode_all(self, values: Array, words: Array) -> bool:
        """Fill all words from float32 values; returns false if one of them is not finite."""

    @abstractmethod
    def decode_all(self, words: Array, values: Array) -> None:
        """Fill float32 values from the words."""

    @override
    def cleared(self, words: Array) -> Array:
        return words  # all of them are overwritten

    @override
    def write(self, values: Array, words: Array) -> Array:
        words[:] = self.encoded
        return self.read(words, values.dtype)

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        values = np.empty(self.count, np.float32)
        self.decode_all(words, values)
        return values.astype(dtype, copy=False)


@dataclass(frozen=True)
class Sign(Encoded):
    """-1 or 1 times the chunk's step, which is its mean magnitude."""

    kind: ClassVar[int] = 6
    bits: ClassVar[int] = 1
    chunk_values: ClassVar[int] = signs.CHUNK_VALUES

    @override
    def encode_all(self, values: Array, words: Array) -> bool:
        return bool(signs.encode(values, *self._steps_and_masks(words)))

    @override
    def decode_all(self, words: Array, values: Array) -> None:
        signs.decode(*self._steps_and_masks(words), values)

    @override
    def write_vector(self, vector: SparseVector, values: Array, words: Array) -> Rounding:
        if not vector.is_run or values.dtype != np.float32 or vector.values.device.type != "cpu":
            return super().write_vector(vector, values, words)
        words[:] = self.encoded
        return Rounding(vector, self.undecoded(words, vector.span[0], vector.numel))

    @override
    def undecoded(self, words: Array, start: int, numel: int) -> SparseVector:
        return Signed(*self._steps_and_masks(words), self.count, start, numel)

    def _steps_and_masks(self, words: Array) -> tuple[Array, Array]:
        steps, room = self._parts(words)
        return steps, room.view(np.uint32)


@dataclass(frozen=True)
class Bit(Sign):
    """-1 or 1 times one step for all values of a message, which is their mean magnitude.

    In memory the step is repeated for every chunk, so that the kernels of `Sign` can read it.
    """

    kind: ClassVar[int] = 7

    @property
    @override
    def num_words(self) -> int:
        return num_words(32) + num_words(self.bits * self.count)

    @classmethod
    @override
    def fitting(cls, values: Array) -> Self | None:
        chunked = Sign.fitting(values)
        if chunked is None:
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
    """A sign and one of two magnitudes that a chunk of values shares. Written as all magnitudes, then all codes."""

    kind: ClassVar[int] = 8
    bits: ClassVar[int] = 2
    chunk_values: ClassVar[int] = twobits.CHUNK_VALUES

    @property
    @override
    def num_words(self) -> int:
        return self.num_chunks + num_words(self.bits * self.count)

    @override
    def encode_all(self, values: Array, words: Array) -> bool:
        return bool(twobits.encode(values, *self._parts(words)))

    @override
    def decode_all(self, words: Array, values: Array) -> None:
        twobits.decode(*self._parts(words), values)

    def _parts(self, words: Array) -> tuple[Array, Array]:
        return words[: self.num_chunks].view(np.float32), words[self.num_chunks :]
