"""Sorted indices as the gaps between them, in as few bits as suit them; compiled.

Most gaps fit in `width` bits. One that does not is marked by a field of all ones, and follows in a second stream of
`wide` bits each. For indices spread at random that comes to within 10 % of the entropy at any density; where they
cluster, gaps are small and few are wide. Both streams are little-endian 64-bit words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, uint64

from gradsieve.kernels.lanes import count_leading_zeros

_compiled = njit(nogil=True, cache=True)
_inlined = njit(nogil=True, cache=True, inline="always")
_ONE, _WORD_SHIFT, _BIT_MASK = uint64(1), uint64(6), uint64(63)

MAX_BITS = 40  # of a gap: no vector is longer, and a sum of index and gap cannot overflow


class GapPlan(NamedTuple):
    """How a run of indices is written."""

    width: int  # bits of a gap
    wide: int  # bits of a gap that does not fit
    num_wide: int

    def num_words(self, count: int) -> int:
        """64-bit words of both streams."""
        return _words(count * self.width) + _words(self.num_wide * self.wide)


def plan(indices: Any, low: int) -> GapPlan:
    """The widths that make the run smallest; `low` is an index that none is below."""
    lengths = np.zeros(65, np.int64)
    _bit_lengths(indices, low, lengths)
    longest = int(lengths.nonzero()[0][-1])
    # A gap g >= 1 is written as g - 1, and 2^width - 1 is the mark: it fits if g has at most `width` bits.
    not_fitting = (lengths.sum() - lengths.cumsum()).tolist()
    plans = (GapPlan(width, longest, not_fitting[width]) for width in range(1, longest + 1))
    return min(plans, key=lambda plan: plan.num_words(indices.size))


@_compiled
def _bit_lengths(indices: Any, low: int, lengths: Any) -> None:
    previous = np.int64(low) - 1
    for j in range(indices.size):
        gap = np.int64(indices[j]) - previous
        lengths[64 - count_leading_zeros(uint64(gap))] += 1
        previous += gap


@_inlined
def _put(words: Any, bit: Any, field: Any) -> None:
    """Write a field into words that are zero from there on."""
    word, offset = bit >> _WORD_SHIFT, bit & _BIT_MASK
    words[word] |= field << offset
    words[word + _ONE] |= (field >> _ONE) >> (_BIT_MASK - offset)  # two shifts: one by 64 is undefined


@_inlined
def _get(words: Any, bit: Any, mask: Any) -> Any:
    word, offset = bit >> _WORD_SHIFT, bit & _BIT_MASK
    return (words[word] >> offset | (words[word + _ONE] << _ONE) << (_BIT_MASK - offset)) & mask


@_compiled
def encode(indices: Any, low: int, width: int, wide: int, words: Any) -> None:
    """Write a run as planned; `words` has the room that the plan says, and one word more."""
    words[:] = 0
    mask = (_ONE << uint64(width)) - _ONE
    bit = uint64(0)
    wide_bit = uint64((indices.size * width + 63) // 64 * 64)
    previous = np.int64(low) - 1
    for j in range(indices.size):
        index = np.int64(indices[j])
        gap = uint64(index - previous - 1)
        previous = index
        if gap >= mask:
            _put(words, wide_bit, gap)
            wide_bit += uint64(wide)
            gap = mask
        _put(words, bit, gap)
        bit += uint64(width)


@_compiled
def decode(words: Any, low: int, high: int, width: int, wide: int, num_wide: int, indices: Any) -> bool:
    """Read a run back; false unless all its indices lie in `[low, high)` and every wide gap is used.

    `words` has one word more than the plan says. Gaps are at least one, so indices come out strictly increasing,
    whatever came in.
    """
    mask = (_ONE << uint64(width)) - _ONE
    wide_mask = (_ONE << uint64(wide)) - _ONE
    bit = uint64(0)
    wide_bit = uint64((indices.size * width + 63) // 64 * 64)
    used = 0
    index = np.int64(low) - 1
    for j in range(indices.size):
        gap = _get(words, bit, mask)
        bit += uint64(width)
        if gap == mask:
            if used == num_wide:
                return False
            gap = _get(words, wide_bit, wide_mask)
            wide_bit += uint64(wide)
            used += 1
        index += np.int64(gap) + 1
        if index >= high:
            return False
        indices[j] = index
    return used == num_wide


def _words(bits: int) -> int:
    return -(-bits // 64)
