"""Sorted indices as the gaps between them, in as few bits as most gaps need; compiled.

Most gaps fit in `width` bits. A gap that does not fit is marked by a field of all ones, and written to a second stream
with `wide` bits per gap. For indices spread at random the size is within 10 % of the entropy at any density. For
clustered indices, most gaps are small and few are wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import uint64

from gradsieve.kernels.bits import ONE, compiled, get, num_words, put
from gradsieve.kernels.lanes import count_leading_zeros

MAX_BITS = 40  # per gap: no vector is longer, and the sum of index and gap cannot overflow


class GapPlan(NamedTuple):
    """How sorted indices are written."""

    width: int  # bits per gap
    wide: int  # bits per gap that does not fit
    num_wide: int  # gaps that do not fit

    def num_words(self, count: int) -> int:
        """The number of 64-bit words of both streams."""
        return num_words(count * self.width) + num_words(self.num_wide * self.wide)


def plan(indices: Any, low: int) -> GapPlan:
    """The widths that give the smallest size for at least one index. No index is below `low`."""
    return GapPlan(*_smallest(indices, low))


@compiled
def _smallest(indices: Any, low: int) -> tuple[int, int, int]:
    lengths = np.zeros(65, np.int64)  # the number of gaps with 0, 1, 2, ... bits
    previous = np.int64(low) - 1
    for j in range(indices.size):
        gap = np.int64(indices[j]) - previous
        lengths[uint64(64 - count_leading_zeros(uint64(gap)))] += 1
        previous += gap
    longest = 64
    while lengths[longest] == 0:
        longest -= 1
    # A gap g >= 1 is written as g - 1, and 2^width - 1 is the mark: it fits if g has at most `width` bits.
    best, num_wide, least = longest, 0, indices.size * longest
    not_fitting = 0
    for width in range(longest - 1, 0, -1):
        not_fitting += lengths[width + 1]
        bits = indices.size * width + not_fitting * longest
        if bits < least:
            best, num_wide, least = width, not_fitting, bits
    return best, longest, num_wide


@compiled
def encode(indices: Any, low: int, width: int, wide: int, words: Any) -> None:
    """Write indices as planned. `words` are zero, and one more than the plan says."""
    mask = (ONE << uint64(width)) - ONE
    wide_bit = uint64((indices.size * width + 63) // 64 * 64)
    width_bits, filled = uint64(width), uint64(0)
    word, pending = uint64(0), uint64(0)
    previous = np.int64(low) - 1
    for j in range(indices.size):
        index = np.int64(indices[j])
        gap = uint64(index - previous - 1)
        previous = index
        if gap >= mask:
            put(words, wide_bit, gap)
            wide_bit += uint64(wide)
            gap = mask
        pending |= gap << filled
        filled += width_bits
        if filled >= uint64(64):
            words[word] = pending
            word += ONE
            filled -= uint64(64)
            pending = gap >> (width_bits - filled)
    if filled > 0:
        words[word] = pending


@compiled
def decode(words: Any, low: int, high: int, width: int, wide: int, num_wide: int, indices: Any) -> bool:
    """Read indices; returns false unless all are in `[low, high)` and every wide gap is used.

    `words` has at least one word more than the plan says. Gaps are at least one, so the indices are strictly increasing
    whatever the words are.
    """
    mask = (ONE << uint64(width)) - ONE
    wide_mask = (ONE << uint64(wide)) - ONE
    bit = uint64(0)
    wide_bit = uint64((indices.size * width + 63) // 64 * 64)
    used = 0
    index = np.int64(low) - 1
    for j in range(indices.size):
        gap = get(words, bit, mask)
        bit += uint64(width)
        if gap == mask:
            if used == num_wide:
                return False
            gap = get(words, wide_bit, wide_mask)
            wide_bit += uint64(wide)
            used += 1
        index += np.int64(gap) + 1
        if index >= high:
            return False
        indices[j] = index
    return used == num_wide
