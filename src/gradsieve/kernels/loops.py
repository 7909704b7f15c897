"""The hot loops, compiled by Numba, over NumPy arrays: no checks here, callers size every buffer.

Each releases the GIL. A loop that collects entries is given room for some of them and returns how many there are:
when that is more than the room less one vector of lanes, some were only counted and the caller tries again with more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32

from gradsieve.kernels.lanes import (
    LANES,
    add_lanes,
    count_set,
    drain_stores,
    large_lanes,
    lowest_set,
    zero_lanes,
)

RADIX_BITS = 11

_compiled = njit(nogil=True, cache=True)
_inlined = njit(nogil=True, cache=True, inline="always")


@_inlined
def _emit(x: Any, index: int, found: int, indices: Any, values: Any) -> int:
    if found < indices.size:
        indices[found] = index
        values[found] = x
    return found + 1


@_compiled
def accumulate(residual: Any, grad: Any, out: Any, head: int, floor: Any, base: int, indices: Any, values: Any) -> int:
    """`out = residual + grad`; collect the sums not below `floor`. `head` entries precede alignment."""
    numel = out.size
    found = 0
    last_start = indices.size - LANES
    lanes_end = head + (numel - head) // LANES * LANES
    for j in range(head):
        out[j] = residual[j] + grad[j]
        if not abs(out[j]) < floor:
            found = _emit(out[j], base + j, found, indices, values)
    for start in range(head, lanes_end, LANES):
        mask = add_lanes(residual, grad, out, start, floor)
        if found > last_start:  # there may be no room for them all: from here on only count
            found += count_set(mask)
            continue
        while mask:
            j = start + lowest_set(mask)
            indices[found] = base + j
            values[found] = residual[j] + grad[j]
            found += 1
            mask &= mask - uint32(1)
    for j in range(lanes_end, numel):
        out[j] = residual[j] + grad[j]
        if not abs(out[j]) < floor:
            found = _emit(out[j], base + j, found, indices, values)
    drain_stores()
    return found


@_compiled
def compact(x: Any, floor: Any, base: int, indices: Any, values: Any) -> int:
    """Collect the entries of `x` that are not below `floor`."""
    numel = x.size
    found = 0
    last_start = indices.size - LANES
    lanes_end = numel // LANES * LANES
    for start in range(0, lanes_end, LANES):
        mask = large_lanes(x, start, floor)
        if found > last_start:  # there may be no room for them all: from here on only count
            found += count_set(mask)
            continue
        while mask:
            j = start + lowest_set(mask)
            indices[found] = base + j
            values[found] = x[j]
            found += 1
            mask &= mask - uint32(1)
    for j in range(lanes_end, numel):
        if not abs(x[j]) < floor:
            found = _emit(x[j], base + j, found, indices, values)
    return found


@_compiled
def kth_key(bits: Any, k: int, key_mask: Any, key_bits: int) -> tuple[int, int]:
    """The k-th largest magnitude as its bit pattern, and how many of its ties belong to the k largest.

    Magnitudes sort as their bit patterns do, NaN above infinity; so a radix descent finds the k-th exactly.
    """
    prefix: Any = np.int64(0)
    left = k
    shift = key_bits
    while shift > 0:
        width = min(RADIX_BITS, shift)
        shift -= width
        counts = np.zeros(1 << width, np.int64)
        digit_mask = (1 << width) - 1
        for j in range(bits.size):
            key = np.int64(bits[j] & key_mask)
            if key >> (shift + width) == prefix:
                counts[(key >> shift) & digit_mask] += 1
        digit = digit_mask
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = (prefix << width) | digit
    return prefix, left


@_compiled
def cut(
    indices: Any,
    values: Any,
    bits: Any,
    key_mask: Any,
    kth: int,
    ties: int,
    kept_indices: Any,
    kept_values: Any,
    dropped_indices: Any,
    dropped_values: Any,
) -> tuple[int, int]:
    """Part entries at the k-th magnitude, keeping the first `ties` of those equal to it."""
    kept = 0
    dropped = 0
    for j in range(indices.size):
        key = np.int64(bits[j] & key_mask)
        tie = key == kth
        if key > kth or (tie and ties > 0):
            ties -= tie
            kept_indices[kept] = indices[j]
            kept_values[kept] = values[j]
            kept += 1
        else:
            if dropped < dropped_indices.size:
                dropped_indices[dropped] = indices[j]
                dropped_values[dropped] = values[j]
            dropped += 1
    return kept, dropped


@_compiled
def merge(a_indices: Any, a_values: Any, b_indices: Any, b_values: Any, out_indices: Any, out_values: Any) -> int:
    """Add two sorted runs."""
    i = 0
    j = 0
    found = 0
    zero = a_values.dtype.type(0)
    a_size = a_indices.size
    b_size = b_indices.size
    while i < a_size and j < b_size:
        # Without branches: which run comes next is a coin toss, and a missed guess costs more than the arithmetic.
        # Both values are loaded first, since the compiler may not move a load out of a condition.
        a_index = a_indices[i]
        b_index = b_indices[j]
        a_value = a_values[i]
        b_value = b_values[j]
        take_a = a_index <= b_index
        take_b = b_index <= a_index
        out_indices[found] = a_index if take_a else b_index
        out_values[found] = (a_value if take_a else zero) + (b_value if take_b else zero)
        found += 1
        i += take_a
        j += take_b
    for rest in range(i, a_size):
        out_indices[found] = a_indices[rest]
        out_values[found] = a_values[rest]
        found += 1
    for rest in range(j, b_size):
        out_indices[found] = b_indices[rest]
        out_values[found] = b_values[rest]
        found += 1
    return found


@_compiled
def exclude(indices: Any, values: Any, other: Any, out_indices: Any, out_values: Any) -> int:
    """The entries whose index is not in the sorted `other`."""
    found = 0
    i = 0
    j = 0
    while i < indices.size and j < other.size:
        index = indices[i]
        excluded = other[j]
        out_indices[found] = index
        out_values[found] = values[i]
        found += index < excluded
        i += index <= excluded
        j += excluded <= index
    for rest in range(i, indices.size):
        out_indices[found] = indices[rest]
        out_values[found] = values[rest]
        found += 1
    return found


@_compiled
def first_disorder(indices: Any, low: int, high: int) -> int:
    """The first position whose index is out of `[low, high)` or not above the one before; -1 if there is none."""
    previous = np.int64(low) - 1
    for position in range(indices.size):
        index = np.int64(indices[position])
        if index <= previous or index >= high:
            return position
        previous = index
    return -1


@_compiled
def write_sparse(out: Any, head: int, base: int, indices: Any, values: Any) -> None:
    """Zeros, stored past the cache, but for the given entries; `out` begins at index `base`, aligned after `head`."""
    lanes_end = head + (out.size - head) // LANES * LANES
    for j in range(head):
        out[j] = 0
    for start in range(head, lanes_end, LANES):
        zero_lanes(out, start)
    for j in range(lanes_end, out.size):
        out[j] = 0
    drain_stores()
    for j in range(indices.size):
        out[indices[j] - base] = values[j]


@_compiled
def scatter_add(out: Any, indices: Any, values: Any) -> None:
    """`out[indices] += values`."""
    for j in range(indices.size):
        out[indices[j]] += values[j]


@_compiled
def settle(accumulated: Any, sent: Any, indices: Any, values: Any) -> None:
    """Zero what was sent, then add back what was not delivered."""
    for j in range(sent.size):
        accumulated[sent[j]] = 0
    for j in range(indices.size):
        accumulated[indices[j]] += values[j]


@_compiled
def sample(x: Any, stretch: int, out: Any) -> None:
    """One entry of each stretch, at a place drawn by Knuth's multiplicative hash of the stretch's number."""
    for number in range(out.size):
        out[number] = x[number * stretch + (number * 2654435761 & 0xFFFFFFFF) % stretch]


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def moments(x: Any) -> tuple[float, float]:
    """Sum and sum of squares, in float64: the square of a small float32 may be zero."""
    total = 0.0
    squares = 0.0
    for j in range(x.size):
        value = np.float64(x[j])
        total += value
        squares += value * value
    return total, squares
