"""Sorted indices as bytes, in the code that needs the fewest.

| code | size, for `count` indices of which the last is below `low + span` |
| --- | --- |
| `plain` | 4 or 8 bytes per index |
| `run` | nothing: the indices follow each other without a gap |
| `bitmap` | one bit per entry of the span: smallest where most entries of the span are sent |
| `blocks` | 2 bytes per index, and 4 for every 65,536 entries of the span |
| `gaps` | per index as many bits as most gaps need, more for a few (see `kernels.gaps`): smallest in most messages |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from gradsieve.kernels import gaps, positions, runs
from gradsieve.kernels.bits import num_words
from gradsieve.kernels.gaps import GapPlan
from gradsieve.registry import Registry
from gradsieve.wire.code import Array, Code


class IndexCode(Code):
    """How the indices of one message are written."""

    @abstractmethod
    def write(self, indices: Array, low: int, words: Array) -> None:
        """Fill `words`, which are `cleared`: `num_words` and one more."""

    @abstractmethod
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """Fill `indices` from the words and one more; returns false unless they strictly increase in `[low, high)`."""

    def decoded(self, words: Array, low: int, high: int, count: int, dtype: np.dtype[Any]) -> Array | None:
        """The indices that `read` gives, or None if it returns false. They may share the memory of the words."""
        indices = np.empty(count, dtype)
        return indices if self.read(words, low, high, indices) else None


@dataclass(frozen=True)
class Plain(IndexCode):
    """Integers of 4 or 8 bytes."""

    kind: ClassVar[int] = 0
    count: int
    itemsize: int

    @property
    @override
    def num_words(self) -> int:
        return num_words(8 * self.count * self.itemsize)

    @override
    def write(self, indices: Array, low: int, words: Array) -> None:
        words.view(indices.dtype)[: self.count] = indices

    @override
    def cleared(self, words: Array) -> Array:
        words[-2:] = 0  # the others are overwritten
        return words

    @override
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        indices[:] = words.view(indices.dtype)[: self.count]
        return _in_order(indices, low, high)

    @override
    def decoded(self, words: Array, low: int, high: int, count: int, dtype: np.dtype[Any]) -> Array | None:
        indices = words.view(dtype)[:count]
        return indices if _in_order(indices, low, high) else None


@dataclass(frozen=True)
class Run(IndexCode):
    """Indices that follow each other without a gap."""

    kind: ClassVar[int] = 1
    start: int  # relative to low

    @property
    @override
    def word(self) -> int:
        return self.kind | self.start << 8

    @property
    @override
    def num_words(self) -> int:
        return 0

    @override
    def write(self, indices: Array, low: int, words: Array) -> None:
        pass

    @override
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        if not self.fits(low, high, indices.size):
            return False
        indices[:] = np.arange(low + self.start, low + self.start + indices.size)
        return True

    def fits(self, low: int, high: int, count: int) -> bool:
        """Whether `count` indices from the start on are in `[low, high)`."""
        return low <= low + self.start <= high - count


@dataclass(frozen=True)
class Bitmap(IndexCode):
    """A bit for every entry of the span."""

    kind: ClassVar[int] = 2
    span: int

    @property
    @override
    def word(self) -> int:
        return self.kind | self.span << 8

    @property
    @override
    def num_words(self) -> int:
        return num_words(self.span)

    @override
    def write(self, indices: Array, low: int, words: Array) -> None:
        positions.encode_bitmap(indices, low, words[:-1])

    @override
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        return bool(positions.decode_bitmap(words[:-1], low, high, indices))


@dataclass(frozen=True)
class Blocks(IndexCode):
    """16-bit offsets within blocks of 65,536 entries."""

    kind: ClassVar[int] = 3
    count: int
    span: int

    @property
    @override
    def word(self) -> int:
        return self.kind | self.span << 8

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the span covers."""
        return -(-self.span // positions.BLOCK_ENTRIES)

    @property
    @override
    def num_words(self) -> int:
        return num_words(32 * self.num_blocks) + num_words(16 * self.count)

    @override
    def write(self, indices: Array, low: int, words: Array) -> None:
        positions.encode_blocks(indices, low, *self._parts(words))

    @override
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        return bool(positions.decode_blocks(*self._parts(words), low, high, indices))

    def _parts(self, words: Array) -> tuple[Array, Array]:
        edge = num_words(32 * self.num_blocks)
        return words[:edge].view(np.uint32)[: self.num_blocks], words[edge:].view(np.uint16)[: self.count]


@dataclass(frozen=True)
class Gaps(IndexCode):
    """The distances between indices."""

    kind: ClassVar[int] = 4
    count: int
    plan: GapPlan

    @property
    @override
    def word(self) -> int:
        return self.kind | self.plan.width << 8 | self.plan.wide << 16 | self.plan.num_wide << 24

    @property
    @override
    def num_words(self) -> int:
        return self.plan.num_words(self.count)

    @override
    def write(self, indices: Array, low: int, words: Array) -> None:
        gaps.encode(indices, low, self.plan.width, self.plan.wide, words)

    @override
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        return bool(gaps.decode(words, low, high, *self.plan, indices))


def _in_order(indices: Array, low: int, high: int) -> bool:
    return int(runs.first_disorder(indices, low, high)) < 0


def _plain(indices: Array, low: int) -> IndexCode:
    return Plain(indices.size, indices.itemsize)


def _bitmap(indices: Array, low: int) -> IndexCode:
    return Bitmap(_span(indices, low))


def _blocks(indices: Array, low: int) -> IndexCode:
    return Blocks(indices.size, _span(indices, low))


def _gaps(indices: Array, low: int) -> IndexCode:
    return Gaps(indices.size, gaps.plan(indices, low)) if indices.size else _plain(indices, low)


def _smallest(indices: Array, low: int) -> IndexCode:
    if indices.size == 0:
        return _plain(indices, low)
    first, span = int(indices[0]), _span(indices, low)
    if first - low + indices.size == span:
        return Run(first - low)
    # A gap takes at least one bit. If a bitmap takes less than that, no other code can be smaller.
    bitmap = Bitmap(span)
    if bitmap.num_words <= num_words(indices.size):
        return bitmap
    # Among codes of equal size the first is taken: they are in the order of the time they take.
    return min(_plain(indices, low), bitmap, _blocks(indices, low), _gaps(indices, low), key=lambda c: c.num_words)


INDEX_CODES: Registry[Callable[[Array, int], IndexCode]] = Registry(
    "index code",
    {"auto": _smallest, "plain": _plain, "bitmap": _bitmap, "blocks": _blocks, "gaps": _gaps},
)


def from_word(word: int, count: int, itemsize: int, room: int) -> IndexCode | None:
    """The code that a header's word describes, for indices in a range of `room` entries; None if it is invalid."""
    kind, rest = word & 0xFF, word >> 8
    plan = GapPlan(rest & 0xFF, rest >> 8 & 0xFF, rest >> 16)
    if kind == Plain.kind and rest == 0:
        return Plain(count, itemsize)
    if kind == Run.kind and 0 <= rest <= room:
        return Run(rest)
    if kind == Bitmap.kind and 0 <= rest <= room:
        return Bitmap(rest)
    if kind == Blocks.kind and 0 <= rest <= room:
        return Blocks(count, rest)
    if kind == Gaps.kind and 1 <= plan.width <= plan.wide <= gaps.MAX_BITS and 0 <= plan.num_wide <= count:
        return Gaps(count, plan)
    return None


def _span(indices: Array, low: int) -> int:
    return int(indices[-1]) - low + 1 if indices.size else 0
