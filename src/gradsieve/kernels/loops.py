"""The hot loops over dense vectors, compiled by Numba. They check nothing: callers size every buffer.

Each loop releases the GIL. A loop that collects entries has room for some of them, and returns how many there are. If
that is more than the room minus `LANES`, some were only counted, and the caller runs the loop again with more room.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32, uint64

from gradsieve.kernels.lanes import (
    LANES,
    add_lanes,
    clear_lanes,
    count_set,
    drain_stores,
    large_lanes,
    lowest_set,
    store_lanes,
)

RADIX_BITS = 11
WINDOW_ENTRIES = 512  # assembled in the cache before they are stored: a few percent of a first-level cache

_ONE = uint64(1)

_compiled = njit(nogil=True, cache=True)
_inlined = njit(nogil=True, cache=True, inline="always")


@_inlined
def _emit(x: Any, index: int, found: int, indices: Any, values: Any) -> int:
    if found < indices.size:
        indices[found] = index
        values[found] = x
    return found + 1


@_compiled
def accumulate(
    residual: Any, grad: Any, out: Any, head: int, floor: Any, clear: bool, base: int, indices: Any, values: Any
) -> int:
    """`out = residual + grad`; collect the sums not below `floor`. `out` is aligned after `head` entries.

    Clearing the gradient here, while it is in the cache, costs a third of clearing it later.
    """
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
        if found > last_start:  # there may not be room for all of them: from here on only count
            found += count_set(mask)
            mask = uint32(0)
        while mask:
            j = start + lowest_set(mask)
            indices[found] = base + j
            values[found] = residual[j] + grad[j]
            found += 1
            mask &= mask - uint32(1)
        if clear:
            clear_lanes(grad, start)
    for j in range(lanes_end, numel):
        out[j] = residual[j] + grad[j]
        if not abs(out[j]) < floor:
            found = _emit(out[j], base + j, found, indices, values)
    if clear:
        grad[:head] = 0
        grad[lanes_end:] = 0
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
        if found > last_start:  # there may not be room for all of them: from here on only count
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
    """The k-th largest magnitude as its bit pattern, and the number of its equals that belong to the k largest.

    Magnitudes are ordered as their bit patterns are, NaN above infinity, so a radix descent finds the k-th exactly.
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
def all_below(bits: Any, key_mask: Any, largest: Any) -> bool:
    """Whether no magnitude, as its bit pattern, is above the largest finite one."""
    above = False
    for j in range(bits.size):
        above |= (bits[j] & key_mask) > largest
    return not above


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
) -> Any:
    """Split entries at the k-th magnitude. The first `ties` of those equal to it are kept.

    Both outputs need room for one more entry: each entry is written to both and counted in one, because a branch would
    be mispredicted too often.
    """
    kept, dropped = uint64(0), uint64(0)
    left: Any = uint64(ties)
    for j in range(indices.size):
        key: Any = np.int64(bits[j] & key_mask)
        tie = uint64(key == kth) & uint64(left > 0)
        keep = uint64(key > kth) | tie
        left -= tie
        kept_indices[kept] = indices[j]
        kept_values[kept] = values[j]
        dropped_indices[dropped] = indices[j]
        dropped_values[dropped] = values[j]
        kept += keep
        dropped += _ONE - keep
    return kept, dropped


@_compiled
def write_sparse(out: Any, head: int, base: int, indices: Any, values: Any) -> None:
    """Zeros except for the given entries. `out` begins at index `base`, and is aligned after `head` entries.

    Each window is assembled in the cache and stored past it once. Writing entries into zeros that are already stored
    would read every touched cache line back.
    """
    windows_end = head + (out.size - head) // WINDOW_ENTRIES * WINDOW_ENTRIES
    window = np.zeros(WINDOW_ENTRIES, out.dtype)
    position, size = uint64(0), uint64(indices.size)
    out[:head] = 0
    while position < size and indices[position] - base < head:
        out[indices[position] - base] = values[position]
        position += _ONE
    for start in range(head, windows_end, WINDOW_ENTRIES):
        first, shift = position, base + start
        while position < size and indices[position] < shift + WINDOW_ENTRIES:
            window[uint64(np.int64(indices[position]) - shift)] = values[position]
            position += _ONE
        for lane in range(0, WINDOW_ENTRIES, LANES):
            store_lanes(window, lane, out, start + lane)
        while first < position:
            window[uint64(np.int64(indices[first]) - shift)] = 0
            first += _ONE
    out[windows_end:] = 0
    while position < size:
        out[indices[position] - base] = values[position]
        position += _ONE
    drain_stores()


@_compiled
def put(out: Any, indices: Any, values: Any) -> None:
    """Overwrite the given entries."""
    for j in range(indices.size):
        out[uint64(indices[j])] = values[j]


@_compiled
def clear(out: Any, indices: Any) -> None:
    """Write zeros at the given indices."""
    for j in range(indices.size):
        out[uint64(indices[j])] = 0


@_compiled
def settle(accumulated: Any, sent: Any, sent_values: Any, indices: Any, values: Any) -> None:
    """Subtract what was sent, add the leftover. Entries that are left over whole are not written."""
    j = 0
    for i in range(sent.size):
        while j < indices.size and indices[j] < sent[i]:
            accumulated[indices[j]] += values[j]
            j += 1
        if j < indices.size and indices[j] == sent[i]:
            if values[j] != sent_values[i]:
                accumulated[sent[i]] = values[j]
            j += 1
        else:
            accumulated[sent[i]] = 0
    for rest in range(j, indices.size):
        accumulated[indices[rest]] += values[rest]


@_compiled
def move_delivered(
    parameter: Any, mean_square: Any, deliveries: Any, indices: Any, values: Any, weights: Any, rate: Any, epsilon: Any
) -> None:
    """Count delivered entries, update the means of their squares, move their parameters."""
    last = weights.size - 1
    for j in range(indices.size):
        index, value = uint64(indices[j]), values[j]
        before = min(int(deliveries[index]), last)
        deliveries[index] = before + 1
        square = mean_square[index]
        square += weights[before] * (value * value - square)
        mean_square[index] = square
        parameter[index] -= rate * value / (np.sqrt(square) + epsilon)


@_compiled
def sample(x: Any, stretch: int, out: Any) -> None:
    """One entry of each stretch, at a position given by Knuth's multiplicative hash of the stretch's number."""
    for number in range(out.size):
        out[number] = x[number * stretch + (number * 2654435761 & 0xFFFFFFFF) % stretch]


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def moments(x: Any) -> tuple[float, float]:
    """Sum and sum of squares, in float64, because the square of a small float32 may be zero in float32."""
    total = 0.0
    squares = 0.0
    for j in range(x.size):
        value = np.float64(x[j])
        total += value
        squares += value * value
    return total, squares
