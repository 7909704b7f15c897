"""Fields of a few bits in little-endian 64-bit words, for the compiled codecs.

A field may extend over two words. Reading a field always reads the word after the one that it begins in, so a stream
must be followed by at least one more word, of any content.
"""

from __future__ import annotations

from typing import Any

from numba import njit, uint64

ONE, WORD_SHIFT, BIT_MASK = uint64(1), uint64(6), uint64(63)

compiled = njit(nogil=True, cache=True)
inlined = njit(nogil=True, cache=True, inline="always")


def num_words(bits: int) -> int:
    """The number of 64-bit words that hold this many bits."""
    return -(-bits // 64)


@inlined
def put(words: Any, bit: Any, field: Any) -> None:
    """Write a field at a bit, from which on the words are zero."""
    word, offset = bit >> WORD_SHIFT, bit & BIT_MASK
    words[word] |= field << offset
    words[word + ONE] |= (field >> ONE) >> (BIT_MASK - offset)  # two shifts, because a shift by 64 is undefined


@inlined
def get(words: Any, bit: Any, mask: Any) -> Any:
    """Read a field at a bit. `mask` has as many low bits set as the field has."""
    word, offset = bit >> WORD_SHIFT, bit & BIT_MASK
    return (words[word] >> offset | (words[word + ONE] << ONE) << (BIT_MASK - offset)) & mask
