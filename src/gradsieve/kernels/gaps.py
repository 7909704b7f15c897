"""Sorted indices as the gaps between them, in as few bits as suit them; compiled.

Most gaps fit in `width` bits. One that does not is marked by a field of all ones, and follows in a second stream of
`wide` bits each. For indices spread at random that comes to within 10 % of the entropy at any density; where they
cluster, gaps are small and few are wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import uint64

from gradsieve.kernels.bits import ONE, compiled, get, num_words, put
from gradsieve.kernels.lanes import count_leading_zeros

MAX_BITS = 40  # of a gap: no vector is longer, and a sum of index and gap cannot overflow


class GapPlan(NamedTuple):
    """How a run of indices is written."""

    width: int  # bits of a gap
    wide: int  # bits of a gap that does not fit
    num_wide: int

    def num_words(self, count: int) -> int:
        """64-bit words of both streams."""
        return num_words(count * self.width) + num_words(self.num_wide * self.wide)


def plan(indices: Any, low: int) -> GapPlan:
    """The widths that make the run, which is not empty, smallest; `low` is an index that none is below."""
    return GapPlan(*_smallest(indices, low))


@compiled
def _smallest(indices: Any, low: int) -> tuple[int, int, int]:
    lengths = np.zeros(65, np.int64)  # how many gaps have so many bits
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
    """Write a run as planned; `words` are zero, as many as the plan says and one more."""
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
    """Read a run back; false unless all its indices lie in `[low, high)` and every wide gap is used.

    `words` has at least one word more than the plan says. Gaps are at least one, so indices come out strictly
    increasing, whatever came in.
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
