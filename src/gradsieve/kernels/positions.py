"""Sorted indices as a bitmap, and as 16-bit offsets within blocks; compiled. Positions are relative to `low`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from gradsieve.kernels.bits import BIT_MASK, ONE, WORD_SHIFT, compiled
from gradsieve.kernels.lanes import lowest_set

BLOCK_BITS = 16
BLOCK_ENTRIES = 1 << BLOCK_BITS


@compiled
def encode_bitmap(indices: Any, low: int, words: Any) -> None:
    """Set the bit of every index in words that are zero."""
    for j in range(indices.size):
        position = uint64(np.int64(indices[j]) - low)
        words[position >> WORD_SHIFT] |= ONE << (position & BIT_MASK)


@compiled
def decode_bitmap(words: Any, low: int, high: int, indices: Any) -> bool:
    """Read the set bits; returns false unless there are as many as `indices` has room for, all below `high`."""
    found = uint64(0)
    size = uint64(indices.size)
    for word in range(words.size):
        bits = words[word]
        first = np.int64(low) + 64 * word
        while bits:
            index = first + np.int64(lowest_set(bits))
            if found == size or index >= high:
                return False
            indices[found] = index
            found += ONE
            bits &= bits - ONE
    return bool(found == size)


@compiled
def encode_blocks(indices: Any, low: int, counts: Any, offsets: Any) -> None:
    """Write the number of indices in each block, to counts that are zero, and each index's offset in its block."""
    for j in range(indices.size):
        position = np.int64(indices[j]) - low
        counts[position >> BLOCK_BITS] += 1
        offsets[j] = position & (BLOCK_ENTRIES - 1)


@compiled
def decode_blocks(counts: Any, offsets: Any, low: int, high: int, indices: Any) -> bool:
    """Read the indices; returns false unless counts add up, and indices strictly increase and are below `high`."""
    done = np.int64(0)
    for block in range(counts.size):
        count = np.int64(counts[block])
        if count > indices.size - done:
            return False
        previous = np.int64(-1)
        first = np.int64(low) + (np.int64(block) << BLOCK_BITS)
        for j in range(done, done + count):
            offset = np.int64(offsets[j])
            if offset <= previous or first + offset >= high:
                return False
            previous = offset
            indices[j] = first + offset
        done += count
    return bool(done == indices.size)
