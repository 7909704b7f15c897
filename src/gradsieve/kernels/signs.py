"""Values as signs: one bit per value, and the mean magnitude of every chunk of values as its step; compiled.

A chunk is read from memory once: first its mean magnitude is computed, then its signs are collected while it is in the
cache. A step of zero is decoded as zero, never as negative zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32

from gradsieve.kernels.bits import compiled
from gradsieve.kernels.lanes import LANES, add_chosen_lanes, choose_lanes, sign_lanes

CHUNK_VALUES = 1024  # values per step of 32 bits: 0.03 bits per value, and 4 KB, which fit a first-level cache


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def mean_magnitude(values: Any) -> Any:
    """Summed in float64, where float32 magnitudes cannot overflow. Not finite if one of the values is not."""
    total = 0.0
    for j in range(values.size):
        total += abs(np.float64(values[j]))
    return np.float32(total / values.size)


@compiled
def encode(values: Any, steps: Any, masks: Any) -> bool:
    """Write steps, and signs in 32-bit words (set: negative), of float32 values; returns false if one is not finite."""
    bits = values.view(np.uint32)
    for chunk in range(steps.size):
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        step = mean_magnitude(values[start:stop])
        if not np.isfinite(step):
            return False
        steps[chunk] = step
        lanes_end = start + (stop - start) // LANES * LANES
        for lane in range(start, lanes_end, LANES):
            masks[lane // LANES] = sign_lanes(bits, lane)
        if lanes_end < stop:
            mask = uint32(0)
            for j in range(lanes_end, stop):
                mask |= bits[j] >> uint32(31) << uint32(j - lanes_end)
            masks[lanes_end // LANES] = mask
    return True


@compiled
def decode(steps: Any, masks: Any, values: Any) -> None:
    """`values = signs * steps`, as float32."""
    for chunk in range(steps.size):
        step = steps[chunk]
        negative = -step if step != 0 else step
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        lanes_end = start + (stop - start) // LANES * LANES
        for lane in range(start, lanes_end, LANES):
            choose_lanes(values, lane, masks[lane // LANES], negative, step)
        for j in range(lanes_end, stop):
            mask = masks[lanes_end // LANES]
            values[j] = negative if mask >> uint32(j - lanes_end) & uint32(1) else step


@compiled
def add(steps: Any, masks: Any, values: Any) -> None:
    """`values += signs * steps`, as float32."""
    for chunk in range(steps.size):
        step = steps[chunk]
        negative = -step if step != 0 else step
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        lanes_end = start + (stop - start) // LANES * LANES
        for lane in range(start, lanes_end, LANES):
            add_chosen_lanes(values, lane, masks[lane // LANES], negative, step)
        for j in range(lanes_end, stop):
            mask = masks[lanes_end // LANES]
            values[j] += negative if mask >> uint32(j - lanes_end) & uint32(1) else step
