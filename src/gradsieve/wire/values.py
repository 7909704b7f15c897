"""The values of a message as bytes: uncompressed, compressed without loss, or rounded.

| name | bits per value | |
| --- | --- | --- |
| `exact` | 32 or 64, for float32 mostly 26 to 28 | leading bits that all magnitudes of a message share are left out |
| `plain` | 32 or 64 | the bytes in memory |
| `float32` | 32 | for float64 vectors |
| `bf16` | 16, mostly 10 to 12 | leading bits that all magnitudes share are left out |
| `fp16` | 16 | |
| `int8`, `int4` | 8, 4 | multiples of a step that 128 values share |
| `sign` | 1 | sign, times the mean magnitude of 1,024 values |
| `bit` | 1 | sign, times the mean magnitude of all values of a message |
| `twobit` | 2 | sign, times one of two magnitudes that 256 values share: the means below and above their mean |

The sender keeps the rounding error (see `Channel`). If a code cannot hold one of the values, because it is not finite
or too large, the whole message is sent exact: nothing is lost, and a NaN reaches every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from gradsieve.kernels import fields
from gradsieve.kernels.bits import num_words
from gradsieve.registry import Registry
from gradsieve.wire.code import Array, ValueCode
from gradsieve.wire.levels import Bit, Byte, Nibble, Sign, Stepped, TwoBit

WORTH_NARROWING_BITS = 30  # a field of 31 bits would save 3 % of the values' bytes, which is not worth the time
BRAIN_SHIFT = 16  # the low bits of a float32 that bfloat16 does not have


@dataclass(frozen=True)
class Native(ValueCode):
    """The bytes in memory."""

    kind: ClassVar[int] = 0
    count: int
    itemsize: int

    @property
    @override
    def num_words(self) -> int:
        return num_words(8 * self.count * self.itemsize)

    @property
    @override
    def is_exact(self) -> bool:
        return True

    @override
    def write(self, values: Array, words: Array) -> Array:
        words.view(values.dtype)[: self.count] = values
        return values

    @override
    def cleared(self, words: Array) -> Array:
        words[-1:] = 0  # the others are overwritten
        return words

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        return words.view(dtype)[: self.count]


@dataclass(frozen=True)
class Narrow(ValueCode):
    """float32 and bfloat16: the sign, and the difference between the magnitude's bit pattern and the smallest one."""

    kind: ClassVar[int] = 1
    count: int
    shift: int  # low bits that are zero: none for float32, which is exact
    base: int  # the smallest magnitude's bit pattern without these bits
    width: int  # bits per value

    @property
    @override
    def word(self) -> int:
        return self.kind | self.width << 8 | self.shift << 16 | self.base << 24

    @property
    @override
    def num_words(self) -> int:
        return num_words(self.count * self.width)

    @property
    @override
    def is_exact(self) -> bool:
        return self.shift == 0

    @override
    def write(self, values: Array, words: Array) -> Array:
        if self.is_exact:
            fields.encode_narrow(values.view(np.uint32), 0, self.base, self.width, words)
            return values
        rounded = _brain(values.astype(np.float32, copy=False).view(np.uint32))
        fields.encode_narrow(rounded, self.shift, self.base, self.width, words)
        return rounded.view(np.float32).astype(values.dtype, copy=False)

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        values = np.empty(self.count, np.float32)
        fields.decode_narrow(words, self.shift, self.base, self.width, values.view(np.uint32))
        return values.astype(dtype, copy=False)

    @classmethod
    def fitting(cls, count: int, span: Iterable[Any], shift: int = 0) -> Narrow:
        """The narrowest code for values between two magnitudes: bit patterns, of which `shift` low bits are zero."""
        least, greatest = (int(bits) >> shift for bits in span)
        return cls(count, shift, least, (greatest - least).bit_length() + 1)


@dataclass(frozen=True)
class Single(ValueCode):
    """float32, for float64 values."""

    kind: ClassVar[int] = 2
    count: int

    @property
    @override
    def num_words(self) -> int:
        return num_words(32 * self.count)

    @override
    def write(self, values: Array, words: Array) -> Array:
        codes = words.view(np.float32)[: self.count]
        codes[:] = values
        return codes.astype(values.dtype)

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        return words.view(np.float32)[: self.count].astype(dtype)


@dataclass(frozen=True)
class Half(ValueCode):
    """IEEE float16."""

    kind: ClassVar[int] = 3
    count: int

    @property
    @override
    def num_words(self) -> int:
        return num_words(16 * self.count)

    @override
    def write(self, values: Array, words: Array) -> Array:
        codes = words.view(np.float16)[: self.count]
        singles = values.astype(np.float32, copy=False)
        rounded = np.empty(self.count, np.float32)
        fields.round_fp16(singles, singles.view(np.uint32), codes.view(np.uint16), rounded.view(np.uint32))
        return rounded.astype(values.dtype, copy=False)

    @override
    def read(self, words: Array, dtype: np.dtype[Any]) -> Array:
        return words.view(np.float16)[: self.count].astype(dtype)


def _exact(values: Array) -> ValueCode:
    if values.dtype == np.float32 and values.size:
        narrow = Narrow.fitting(values.size, fields.magnitude_span(values.view(np.uint32)))
        if narrow.width <= WORTH_NARROWING_BITS:
            return narrow
    return _plain(values)


def _plain(values: Array) -> ValueCode:
    return Native(values.size, values.itemsize)


def _float32(values: Array) -> ValueCode | None:
    is_wider = values.itemsize > np.float32().itemsize
    return Single(values.size) if is_wider and _fits(_span(values), np.finfo(np.float32).max) else None


def _bf16(values: Array) -> ValueCode | None:
    span = _span(values)
    return Narrow.fitting(values.size, _brain(span), BRAIN_SHIFT) if _fits(span, fields.LARGEST_BF16) else None


def _fp16(values: Array) -> ValueCode | None:
    return Half(values.size) if _fits(_span(values), fields.LARGEST_FP16) else None


def _stepped(code: type[Stepped]) -> Callable[[Array], ValueCode | None]:
    return lambda values: code(values.size) if _fits(_span(values), np.finfo(np.float32).max) else None


VALUE_CODES: Registry[Callable[[Array], ValueCode | None]] = Registry(
    "value code",
    {
        "exact": _exact,
        "plain": _plain,
        "float32": _float32,
        "bf16": _bf16,
        "fp16": _fp16,
        "int8": _stepped(Byte),
        "int4": _stepped(Nibble),
        "sign": Sign.fitting,
        "bit": Bit.fitting,
        "twobit": TwoBit.fitting,
    },
)
"""By name, the code for some values, of which there is at least one; None if the code cannot hold them."""

_SIMPLE: dict[int, Any] = {code.kind: code for code in (Single, Half, Byte, Nibble, Sign, Bit, TwoBit)}


def chosen(name: str, values: Array) -> ValueCode:
    """The named code, or an exact one if the named code cannot hold these values."""
    code = VALUE_CODES[name](values) if values.size else None
    return _exact(values) if code is None else code


def _span(values: Array) -> Array:
    """The least and the greatest magnitude as bit patterns of float32; no elements for half precision."""
    if values.dtype == np.float32:
        return np.array(fields.magnitude_span(values.view(np.uint32)), np.uint32)
    if values.dtype == np.float64:
        magnitudes = np.abs(values)
        with np.errstate(over="ignore"):  # values that float32 cannot hold become infinite, above all limits
            return np.array([magnitudes.min(), magnitudes.max()]).astype(np.float32).view(np.uint32)
    return np.empty(0, np.uint32)


def _fits(span: Array, largest: float | np.floating[Any]) -> bool:
    """Whether all magnitudes are at most `largest`; false for NaN and for half precision."""
    return span.size > 0 and bool(span.view(np.float32)[1] <= largest)


def _brain(bits: Array) -> Array:
    """Bit patterns of float32, rounded so that the lower half is zero, as in bfloat16. Rounding keeps their order."""
    rounded = np.empty_like(bits)
    fields.round_bf16(bits, rounded)
    return rounded


def from_word(word: int, count: int, itemsize: int) -> ValueCode | None:
    """The code that a header's word describes, or None if the word is invalid."""
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
