"""Fields of a few bits in little-endian 64-bit words: what the compiled codecs are written with.

A field may lie across two words. Reading one looks at the word after the one it begins in, whether or not it reaches
that far; so a stream must be followed by at least one word of anything.
"""

from __future__ import annotations

from typing import Any

from numba import njit, uint64

ONE, WORD_SHIFT, BIT_MASK = uint64(1), uint64(6), uint64(63)

compiled = njit(nogil=True, cache=True)
inlined = njit(nogil=True, cache=True, inline="always")


def num_words(bits: int) -> int:
    """64-bit words that hold so many bits."""
    return -(-bits // 64)


@inlined
def put(words: Any, bit: Any, field: Any) -> None:
    """Write a field into words that are zero from there on."""
    word, offset = bit >> WORD_SHIFT, bit & BIT_MASK
    words[word] |= field << offset
    words[word + ONE] |= (field >> ONE) >> (BIT_MASK - offset)  # two shifts: one by 64 is undefined


@inlined
def get(words: Any, bit: Any, mask: Any) -> Any:
    """Read a field; `mask` has its bits set."""
    word, offset = bit >> WORD_SHIFT, bit & BIT_MASK
    return (words[word] >> offset | (words[word + ONE] << ONE) << (BIT_MASK - offset)) & mask
