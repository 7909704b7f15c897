"""Values in fewer bits: without loss by leaving out what they have in common, or rounded to a few levels; compiled.

What a rounding loop writes to `rounded` is what the reading loop gives back, bit for bit, on any machine: both compute
it by one float32 multiplication.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32, uint64

from gradsieve.kernels.bits import ONE, compiled, get

CHUNK_VALUES = 128  # that share a scale; fewer fits the scale closer, but sends more scales

_MAGNITUDE = uint32(0x7FFFFFFF)
_SIGN_SHIFT = uint32(31)
_LEAST_STEP = np.finfo(np.float32).tiny  # below, one over the step is infinite

# The largest magnitudes that do not round to infinity.
LARGEST_BF16 = float(np.array([0x7F7F7FFF], np.uint32).view(np.float32)[0])
LARGEST_FP16 = 65519.0


@compiled
def magnitude_span(bits: Any) -> tuple[Any, Any]:
    """The least and the greatest magnitude of float32 values, as bit patterns, in which order magnitudes are."""
    least, greatest = _MAGNITUDE, uint32(0)
    for j in range(bits.size):
        magnitude = bits[j] & _MAGNITUDE
        least = min(least, magnitude)
        greatest = max(greatest, magnitude)
    return least, greatest


@compiled
def encode_narrow(bits: Any, shift: int, base: int, width: int, words: Any) -> None:
    """Each sign and the magnitude's distance from `base`, without its `shift` low bits, in `width` bits together."""
    offset, width_bits, dropped = uint64(base), uint64(width), uint32(shift)
    word, pending, filled = uint64(0), uint64(0), uint64(0)
    for j in range(bits.size):
        value = bits[j]
        field = (uint64((value & _MAGNITUDE) >> dropped) - offset) << ONE | uint64(value >> _SIGN_SHIFT)
        pending |= field << filled
        filled += width_bits
        if filled >= uint64(64):
            words[word] = pending
            word += ONE
            filled -= uint64(64)
            pending = field >> (width_bits - filled)
    if filled > 0:
        words[word] = pending


@compiled
def decode_narrow(words: Any, shift: int, base: int, width: int, bits: Any) -> None:
    """Read the values back; `words` has at least one word more than they take."""
    mask = (ONE << uint64(width)) - ONE
    offset, bit, dropped = uint64(base), uint64(0), uint32(shift)
    for j in range(bits.size):
        field = get(words, bit, mask)
        bit += uint64(width)
        bits[j] = ((uint32(offset + (field >> ONE)) << dropped) & _MAGNITUDE) | (uint32(field & ONE) << _SIGN_SHIFT)


@compiled
def encode_levels(values: Any, levels: int, steps: Any, codes: Any, rounded: Any) -> None:
    """The nearest multiple of a step, between `-levels` and `levels`; the step fits the chunk's greatest magnitude."""
    for chunk in range(steps.size):
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        greatest = np.float32(0)
        for j in range(start, stop):
            greatest = max(greatest, abs(np.float32(values[j])))
        step = greatest / np.float32(levels)
        if step < _LEAST_STEP:
            step = np.float32(0)
        scale = np.float32(0) if step == 0 else np.float32(1) / step
        steps[chunk] = step
        for j in range(start, stop):
            code = np.rint(np.float32(values[j]) * scale)
            code = min(max(code, np.float32(-levels)), np.float32(levels))
            codes[j] = np.int8(code)
            rounded[j] = np.float32(codes[j]) * step  # from the whole number: it has no negative zero


@compiled
def decode_levels(steps: Any, codes: Any, values: Any) -> None:
    """Codes times steps."""
    for chunk in range(steps.size):
        step = steps[chunk]
        start = chunk * CHUNK_VALUES
        for j in range(start, min(start + CHUNK_VALUES, values.size)):
            values[j] = np.float32(codes[j]) * step


@compiled
def encode_signs(values: Any, steps: Any, codes: Any, rounded: Any) -> None:
    """Codes of one and minus one; the step is the chunk's mean magnitude."""
    for chunk in range(steps.size):
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        total = 0.0
        for j in range(start, stop):
            total += abs(np.float64(values[j]))
        step = np.float32(total / (stop - start))
        steps[chunk] = step
        for j in range(start, stop):
            codes[j] = -1 if values[j] < 0 else 1
            rounded[j] = np.float32(codes[j]) * step


@compiled
def round_bf16(bits: Any, rounded: Any) -> None:
    """Each float32 without its lower half, rounded to nearest, ties to even; both as bit patterns."""
    for j in range(bits.size):
        odd = bits[j] >> uint32(16) & uint32(1)
        rounded[j] = (bits[j] + uint32(0x7FFF) + odd) & uint32(0xFFFF0000)
