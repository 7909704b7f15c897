"""Sorted indices as bytes, in the code that takes the fewest.

| code | bytes for `count` indices that span `span` entries from `low` on |
| --- | --- |
| `plain` | 4 or 8 each |
| `run` | none: they follow each other without a gap |
| `bitmap` | one bit an entry of the span: where it is crowded |
| `blocks` | 2 each, and 4 for every 65,536 entries of the span |
| `gaps` | as many bits as most gaps need, and more for the few others (see `kernels.gaps`): mostly the smallest |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradsieve.kernels import gaps, places, runs
from gradsieve.kernels.bits import num_words
from gradsieve.kernels.gaps import GapPlan
from gradsieve.registry import Registry
from gradsieve.wire.code import Array, Code


class IndexCode(Code):
    """How the indices of one message are written."""

    @abstractmethod
    def write(self, indices: Array, low: int, words: Array) -> None:
        """Fill `words`, which are `cleared`: `num_words`, and one more."""

    @abstractmethod
    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """Fill `indices`, strictly increasing in `[low, high)`; false if the words, and one more, do not hold such."""

    def decoded(self, words: Array, low: int, high: int, count: int, dtype: np.dtype[Any]) -> Array | None:
        """What `read` gives, in memory of its own or in that of the words; None for its false."""
        indices = np.empty(count, dtype)
        return indices if self.read(words, low, high, indices) else None


@dataclass(frozen=True)
class Plain(IndexCode):
    """Whole numbers."""

    kind: ClassVar[int] = 0
    count: int
    itemsize: int

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(8 * self.count * self.itemsize)

    def write(self, indices: Array, low: int, words: Array) -> None:
        """See `IndexCode.write`."""
        words.view(indices.dtype)[: self.count] = indices

    def cleared(self, words: Array) -> Array:
        """See `Code.cleared`: all but the end is written over."""
        words[-2:] = 0
        return words

    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """See `IndexCode.read`."""
        indices[:] = words.view(indices.dtype)[: self.count]
        return _in_order(indices, low, high)

    def decoded(self, words: Array, low: int, high: int, count: int, dtype: np.dtype[Any]) -> Array | None:
        """See `IndexCode.decoded`: they are there already."""
        indices = words.view(dtype)[:count]
        return indices if _in_order(indices, low, high) else None


@dataclass(frozen=True)
class Run(IndexCode):
    """Indices that follow each other without a gap."""

    kind: ClassVar[int] = 1
    start: int  # relative to low

    @property
    def word(self) -> int:
        """See `Code.word`."""
        return self.kind | self.start << 8

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return 0

    def write(self, indices: Array, low: int, words: Array) -> None:
        """See `IndexCode.write`."""

    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """See `IndexCode.read`."""
        if not self.fits(low, high, indices.size):
            return False
        indices[:] = np.arange(low + self.start, low + self.start + indices.size)
        return True

    def fits(self, low: int, high: int, count: int) -> bool:
        """Whether so many indices lie in `[low, high)`."""
        return low <= low + self.start <= high - count


@dataclass(frozen=True)
class Bitmap(IndexCode):
    """A bit for every entry of the span."""

    kind: ClassVar[int] = 2
    span: int

    @property
    def word(self) -> int:
        """See `Code.word`."""
        return self.kind | self.span << 8

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(self.span)

    def write(self, indices: Array, low: int, words: Array) -> None:
        """See `IndexCode.write`."""
        places.encode_bitmap(indices, low, words[:-1])

    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """See `IndexCode.read`."""
        return bool(places.decode_bitmap(words[:-1], low, high, indices))


@dataclass(frozen=True)
class Blocks(IndexCode):
    """16-bit offsets within blocks of 65,536 entries."""

    kind: ClassVar[int] = 3
    count: int
    span: int

    @property
    def word(self) -> int:
        """See `Code.word`."""
        return self.kind | self.span << 8

    @property
    def num_blocks(self) -> int:
        """How many blocks the span covers."""
        return -(-self.span // places.BLOCK_ENTRIES)

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return num_words(32 * self.num_blocks) + num_words(16 * self.count)

    def write(self, indices: Array, low: int, words: Array) -> None:
        """See `IndexCode.write`."""
        places.encode_blocks(indices, low, *self._parts(words))

    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """See `IndexCode.read`."""
        return bool(places.decode_blocks(*self._parts(words), low, high, indices))

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
    def word(self) -> int:
        """See `Code.word`."""
        return self.kind | self.plan.width << 8 | self.plan.wide << 16 | self.plan.num_wide << 24

    @property
    def num_words(self) -> int:
        """See `Code.num_words`."""
        return self.plan.num_words(self.count)

    def write(self, indices: Array, low: int, words: Array) -> None:
        """See `IndexCode.write`."""
        gaps.encode(indices, low, self.plan.width, self.plan.wide, words)

    def read(self, words: Array, low: int, high: int, indices: Array) -> bool:
        """See `IndexCode.read`."""
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
    # A gap takes a bit at least: where entries are so crowded that a bitmap takes less, gaps need not be looked at.
    bitmap = Bitmap(span)
    if bitmap.num_words <= num_words(indices.size):
        return bitmap
    # Among equals the first is taken: they stand in the order of the time they take.
    return min(_plain(indices, low), bitmap, _blocks(indices, low), _gaps(indices, low), key=lambda c: c.num_words)


INDEX_CODES: Registry[Callable[[Array, int], IndexCode]] = Registry(
    "index code",
    {"auto": _smallest, "plain": _plain, "bitmap": _bitmap, "blocks": _blocks, "gaps": _gaps},
)


def from_word(word: int, count: int, itemsize: int, room: int) -> IndexCode | None:
    """What a received word says of indices in a range of `room` entries; None if it makes no sense."""
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
