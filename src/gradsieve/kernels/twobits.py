"""Values as a sign and one of two magnitudes: two bits per value, and two magnitudes per chunk of values; compiled.

1. The threshold is the chunk's mean magnitude.
2. The low level is the mean of the magnitudes below it, the high level the mean of the others: one step of Lloyd's
   algorithm.
3. Each word of codes has 32 values: in the lower half their signs (set: negative), in the upper half their levels (set:
   high).

A level of zero is decoded as zero, never as negative zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32, uint64

from gradsieve.kernels.bits import compiled
from gradsieve.kernels.lanes import LANES, large_lanes, sign_lanes
from gradsieve.kernels.signs import mean_magnitude

CHUNK_VALUES = 256
"""Values per two levels of 32 bits: 0.25 bits per value, next to about 8 bits per index at a density of 1.6 %.

Longer chunks would save less than 3 % of a message and fit values of different scale worse. At 64 of 4,096 entries,
256 values come from 16,384 entries, which is a few rows of one matrix.
"""


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _means(values: Any, threshold: Any) -> tuple[Any, Any]:
    """Mean magnitudes below the threshold and of the others, zero for none. Sums in float64 cannot overflow."""
    below, above = 0.0, 0.0
    num_below = 0
    for j in range(values.size):
        magnitude = np.float64(abs(values[j]))
        is_below = abs(values[j]) < threshold
        below += magnitude if is_below else 0.0
        above += 0.0 if is_below else magnitude
        num_below += is_below
    num_above = values.size - num_below
    return np.float32(below / max(num_below, 1)), np.float32(above / max(num_above, 1))


@compiled
def encode(values: Any, levels: Any, codes: Any) -> bool:
    """Write two levels per chunk, and 64-bit words of codes, of float32 values; returns false if one is not finite."""
    bits = values.view(np.uint32)
    for chunk in range(levels.size // 2):
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        threshold = mean_magnitude(values[start:stop])  # 1
        if not np.isfinite(threshold):
            return False
        levels[2 * chunk], levels[2 * chunk + 1] = _means(values[start:stop], threshold)  # 2
        lanes_end = start + (stop - start) // LANES * LANES
        for lane in range(start, lanes_end, LANES):  # 3
            large = uint64(large_lanes(values, lane, threshold))
            codes[lane // LANES] = uint64(sign_lanes(bits, lane)) | large << uint64(LANES)
        if lanes_end < stop:
            word = uint64(0)
            for j in range(lanes_end, stop):
                large = uint64(not abs(values[j]) < threshold)
                field = uint64(bits[j] >> uint32(31)) | large << uint64(LANES)
                word |= field << uint64(j - lanes_end)
            codes[lanes_end // LANES] = word
    return True


@compiled
def decode(levels: Any, codes: Any, values: Any) -> None:
    """`values = signs * levels`, as float32."""
    for chunk in range(levels.size // 2):
        low, high = levels[2 * chunk], levels[2 * chunk + 1]
        negative_low = -low if low != 0 else low
        negative_high = -high if high != 0 else high
        start = chunk * CHUNK_VALUES
        for lane in range(start, min(start + CHUNK_VALUES, values.size), LANES):
            signs, large = uint32(codes[lane // LANES]), uint32(codes[lane // LANES] >> uint64(LANES))
            for j in range(min(LANES, values.size - lane)):
                positive, negative = (high, negative_high) if large >> uint32(j) & uint32(1) else (low, negative_low)
                values[lane + j] = negative if signs >> uint32(j) & uint32(1) else positive
