"""The largest entries of each chunk of a vector, compiled: a chunk is read from memory once and selected in the cache.

For each chunk:
1. Collect the magnitudes that are not below a floor. It is the previous chunk's smallest selected magnitude, lowered.
2. If that gives enough candidates and not too many, a bisection over bit patterns finds the smallest selected magnitude
   among them. A count of a hundred candidates takes a few vector instructions, and there are no branches to mispredict.
   Otherwise a radix descent over the whole chunk finds it. The result is exact either way.
3. Write the entries above that magnitude, and the first of those equal to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32

from gradsieve.kernels.bits import compiled
from gradsieve.kernels.lanes import LANES, count_set, large_lanes, lowest_set
from gradsieve.kernels.loops import kth_key

CAUTION = 0.75  # the floor is lowered by CAUTION / sqrt(share): more needs fewer radix descents, and collects more


@compiled
def select(
    x: Any, bits: Any, key_mask: Any, key_bits: int, length: int, base: int, edges: Any, indices: Any, values: Any
) -> int:
    """Select from each chunk of `length` entries its share of largest magnitudes; returns the number without zeros.

    `bits` are the bit patterns of `x`, which begins at index `base`. The share of chunk i is `edges[i + 1] - edges[i]`,
    at least one and at most the length of the chunk. `indices` and `values` have room for all shares.
    """
    shares = edges[1:] - edges[:-1]
    candidates = np.empty(min(length, 4 * shares.max() + 256) + LANES, bits.dtype)
    least = np.nextafter(x.dtype.type(0), x.dtype.type(1))
    floor = x.dtype.type(np.inf)
    key_of_kth = np.empty(1, bits.dtype)
    found = 0
    kth: Any
    ties: Any
    for chunk in range(shares.size):
        start, share = chunk * length, shares[chunk]
        part, keys = x[start : start + length], bits[start : start + length]
        count = _collect(part, keys, key_mask, floor, candidates)
        if count < share and floor == least:  # the other entries are zero
            kth, ties = np.int64(0), np.int64(0)
        elif count < share or count > candidates.size - LANES:
            kth, ties = kth_key(keys, share, key_mask, key_bits)
        else:
            kth, ties = _kth_of_few(candidates[:count], share)
        key_of_kth[0] = kth
        magnitude = key_of_kth.view(x.dtype)[0]
        found = _write(part, keys, key_mask, max(magnitude, least), kth, ties, base + start, found, indices, values)
        floor = max(x.dtype.type(magnitude * (1 - CAUTION / np.sqrt(share))), least)
    return found


@compiled
def _collect(part: Any, keys: Any, key_mask: Any, floor: Any, candidates: Any) -> int:
    """Collect magnitudes not below `floor`, as bit patterns. If there is no room left, they are only counted."""
    found = 0
    last_start = candidates.size - LANES
    lanes_end = part.size // LANES * LANES
    for start in range(0, lanes_end, LANES):
        mask = large_lanes(part, start, floor)
        if found > last_start:
            found += count_set(mask)
            continue
        while mask:
            candidates[found] = keys[start + lowest_set(mask)] & key_mask
            found += 1
            mask &= mask - uint32(1)
    for j in range(lanes_end, part.size):
        if not abs(part[j]) < floor:
            if found < candidates.size:
                candidates[found] = keys[j] & key_mask
            found += 1
    return found


@compiled
def _kth_of_few(keys: Any, k: int) -> tuple[Any, Any]:
    """The k-th largest key, and the number of keys equal to it that belong to the k largest."""
    low, high = np.int64(keys.min()), np.int64(keys.max())
    while low < high:  # the k-th is in [low, high]
        middle = low + (high - low + 1) // 2
        if _count_from(keys, keys.dtype.type(middle)) >= k:
            low = middle
        else:
            high = middle - 1
    above = _count_from(keys, keys.dtype.type(low)) - _count_equal(keys, keys.dtype.type(low))
    return low, k - above


@compiled
def _count_from(keys: Any, least: Any) -> Any:
    count = uint32(0)
    for j in range(keys.size):
        count += uint32(keys[j] >= least)
    return np.int64(count)


@compiled
def _count_equal(keys: Any, key: Any) -> Any:
    count = uint32(0)
    for j in range(keys.size):
        count += uint32(keys[j] == key)
    return np.int64(count)


@compiled
def _write(
    part: Any,
    keys: Any,
    key_mask: Any,
    floor: Any,
    kth: int,
    ties: int,
    base: int,
    found: int,
    indices: Any,
    values: Any,
) -> int:
    """Write the entries above the k-th magnitude, and the first `ties` of those equal to it. None is below `floor`."""
    lanes_end = part.size // LANES * LANES
    for start in range(0, part.size, LANES):
        if start < lanes_end:
            mask = large_lanes(part, start, floor)
        else:
            mask = uint32(0)
            for j in range(start, part.size):
                mask |= uint32(not abs(part[j]) < floor) << uint32(j - start)
        while mask:
            j = start + lowest_set(mask)
            mask &= mask - uint32(1)
            key = np.int64(keys[j] & key_mask)
            if key == kth:
                if ties == 0:
                    continue
                ties -= 1
            elif key < kth:  # if the floor is NaN, no entry is below it
                continue
            indices[found] = base + j
            values[found] = part[j]
            found += 1
    return found
