"""The values of a message as bytes: as they are, without loss in fewer bits, or rounded.

| name | bits a value | |
| --- | --- | --- |
| `exact` | 32 or 64, float32 mostly 26 to 28 | what all magnitudes of a message have in common is left out |
| `plain` | 32 or 64 | as they are in memory |
| `float32` | 32 | for float64 vectors |
| `bf16` | 16, mostly 10 to 12 | likewise |
| `fp16` | 16 | |
| `int8`, `int4` | 8, 4 | multiples of a step that 128 values share |
| `sign` | 1 | the mean magnitude that 1,024 values share |
| `bit` | 1 | the mean magnitude of all values of a message |
| `twobit` | 2 | two magnitudes that 256 values share: the means of those below and above their mean |

What rounding takes away is known to the sender, who keeps it: see `Channel`. Values that a code cannot hold (not
finite, or too large) make the whole message travel exact, so that nothing is lost and a NaN reaches everybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradsieve.kernels import fields
from gradsieve.kernels.bits import num_words
from gradsieve.registry import Registry
from gradsieve.wire.code import Array, ValueCode
from gradsieve.wire.levels import Bit, Byte, Encoded, Nibble, Sign, TwoBit

WORTH_NARROWING_BITS = 30  # wider fields save too little for the time they take
BRAIN_SHIFT = 16


@dataclass(frozen=True)
class Native(ValueCode):
    """As they are in memory."""

    kind: ClassVar[int] = 0
    count: int
    itemsize: int

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(8 * self.count * self.itemsize)

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        words.view(values.dtype)[: self.count] = values
        return values

    def cleared(self, words: Array) -> Array:
        """See `Code.cleared`: all but the end is written over."""
        words[-1:] = 0
        return words

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        return words.view(dtype)[: self.count]


@dataclass(frozen=True)
class Narrow(ValueCode):
    """float32 and bfloat16: sign, and how far the magnitude's bit pattern lies above the least one's."""

    kind: ClassVar[int] = 1
    largest: ClassVar[float] = fields.LARGEST_BF16  # for values that are rounded
    count: int
    shift: int  # low bits that are zero
    base: int
    width: int

    @property
    def word(self) -> int:
        """See `Code.word`."""
        return self.kind | self.width << 8 | self.shift << 16 | self.base << 24

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(self.count * self.width)

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        if self.shift == 0:
            fields.encode_narrow(values.view(np.uint32), 0, self.base, self.width, words)
            return values
        rounded = _brain(values.astype(np.float32, copy=False).view(np.uint32))
        fields.encode_narrow(rounded, self.shift, self.base, self.width, words)
        return rounded.view(np.float32).astype(values.dtype, copy=False)

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        values = np.empty(self.count, np.float32)
        fields.decode_narrow(words, self.shift, self.base, self.width, values.view(np.uint32))
        return values.astype(dtype, copy=False)

    @classmethod
    def fitting(cls, count: int, span: Iterable[Any], shift: int = 0) -> Narrow:
        """The narrowest for values between these magnitudes: bit patterns, of which `shift` low bits are zero."""
        least, greatest = (int(bits) >> shift for bits in span)
        return cls(count, shift, least, (greatest - least).bit_length() + 1)


@dataclass(frozen=True)
class Single(ValueCode):
    """float32 for values that have more."""

    kind: ClassVar[int] = 2
    count: int

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(32 * self.count)

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        codes = words.view(np.float32)[: self.count]
        codes[:] = values
        return codes.astype(values.dtype)

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        return words.view(np.float32)[: self.count].astype(dtype)


@dataclass(frozen=True)
class Half(ValueCode):
    """IEEE float16."""

    kind: ClassVar[int] = 3
    largest: ClassVar[float] = fields.LARGEST_FP16
    count: int

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(16 * self.count)

    def write(self, values: Array, words: Array) -> Array:
        """See `ValueCode.write`."""
        codes = words.view(np.float16)[: self.count]
        singles = values.astype(np.float32, copy=False)
        rounded = np.empty(self.count, np.float32)
        fields.round_fp16(singles, singles.view(np.uint32), codes.view(np.uint16), rounded.view(np.uint32))
        return rounded.astype(values.dtype, copy=False)

    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """See `ValueCode.read`."""
        return words.view(np.float16)[: self.count].astype(dtype)


VALUE_CODES: Registry[type[ValueCode] | None] = Registry(
    "value code",
    {
        "exact": None,
        "plain": Native,
        "float32": Single,
        "bf16": Narrow,
        "fp16": Half,
        "int8": Byte,
        "int4": Nibble,
        "sign": Sign,
        "bit": Bit,
        "twobit": TwoBit,
    },
)
_SIMPLE: dict[int, Any] = {code.kind: code for code in (Single, Half, Byte, Nibble, Sign, Bit, TwoBit)}


def chosen(name: str, values: Array) -> ValueCode:
    """The named code for these values, or an exact one if they are none that it can hold."""
    code: Any = VALUE_CODES[name]
    if code is Native:
        return Native(values.size, values.itemsize)
    if code is None or values.size == 0 or (code is Single and values.itemsize <= 4):
        return _exact(values)
    if issubclass(code, Encoded):
        return code.fitting(values) or _exact(values)
    span = _span(values)
    if span is None or not span.view(np.float32)[1] <= code.largest:
        return _exact(values)
    made: ValueCode = Narrow.fitting(values.size, _brain(span), BRAIN_SHIFT) if code is Narrow else code(values.size)
    return made


def _exact(values: Array) -> ValueCode:
    if values.dtype == np.float32 and values.size:
        narrow = Narrow.fitting(values.size, fields.magnitude_span(values.view(np.uint32)))
        if narrow.width <= WORTH_NARROWING_BITS:
            return narrow
    return Native(values.size, values.itemsize)


def _span(values: Array) -> Array | None:
    """The least and the greatest magnitude as bit patterns of float32; None for values of another kind."""
    if values.dtype == np.float32:
        return np.array(fields.magnitude_span(values.view(np.uint32)), np.uint32)
    if values.dtype == np.float64:
        magnitudes = np.abs(values)
        with np.errstate(over="ignore"):  # too large a one is infinite then, and above all limits
            return np.array([magnitudes.min(), magnitudes.max()]).astype(np.float32).view(np.uint32)
    return None


def _brain(bits: Array) -> Array:
    """Bit patterns of float32, rounded so that the lower half is zero: what bfloat16 holds. Keeps their order."""
    rounded = np.empty_like(bits)
    fields.round_bf16(bits, rounded)
    return rounded


def from_word(word: int, count: int, itemsize: int) -> ValueCode | None:
    """What a received word says; None if it makes no sense."""
    kind, rest = word & 0xFF, word >> 8
    if kind == Narrow.kind:
        width, shift, base = rest & 0xFF, rest >> 8 & 0xFF, rest >> 16
        sane = 1 <= width <= WORTH_NARROWING_BITS and shift in (0, BRAIN_SHIFT) and 0 <= base < 1 << 31
        return Narrow(count, shift, base, width) if sane else None
    if rest != 0:
        return None
    if kind == Native.kind:
        return Native(count, itemsize)
    code: Any = _SIMPLE.get(kind)
    made: ValueCode | None = code(count) if code else None
    return made
