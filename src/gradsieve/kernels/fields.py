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
_LEAST_NORMAL_HALF = uint32(0x38800000)  # 2 to the -14, as a float32
_HALF_BIAS = uint32((0xFFF - (112 << 23)) & 0xFFFFFFFF)  # between the two's exponents, and half of the last bit
_EXPONENTS_APART = uint32(112 << 23)
_ONE_HALF = uint32(0x3F000000)
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
def encode_levels(values: Any, bits: Any, levels: int, steps: Any, codes: Any, rounded: Any) -> None:
    """The nearest multiple of a step, between `-levels` and `levels`; the step fits the chunk's greatest magnitude.

    `bits` are those of the float32 values: as whole numbers magnitudes are compared eight at a time. Each loop does one
    thing, or none would be.
    """
    most = np.int32(levels)
    peak = np.empty(1, np.uint32)
    for chunk in range(steps.size):
        start = chunk * CHUNK_VALUES
        stop = min(start + CHUNK_VALUES, values.size)
        greatest = uint32(0)
        for j in range(start, stop):
            greatest = max(greatest, bits[j] & _MAGNITUDE)
        peak[0] = greatest
        step = peak.view(np.float32)[0] / np.float32(levels)
        if step < _LEAST_STEP:
            step = np.float32(0)
        scale = np.float32(0) if step == 0 else np.float32(1) / step
        steps[chunk] = step
        for j in range(start, stop):
            codes[j] = min(max(np.int32(np.rint(values[j] * scale)), -most), most)
        for j in range(start, stop):
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
def pack_nibbles(codes: Any, data: Any) -> None:
    """Two codes in a byte, the first below; an odd one has a zero above it."""
    for j in range(codes.size // 2):
        data[j] = np.uint8(codes[2 * j]) & np.uint8(15) | np.uint8(codes[2 * j + 1]) << np.uint8(4)
    if codes.size % 2:
        data[codes.size // 2] = np.uint8(codes[codes.size - 1]) & np.uint8(15)


@compiled
def unpack_nibbles(data: Any, codes: Any) -> None:
    """The codes again, with their signs."""
    for j in range(codes.size // 2):
        byte = np.int32(data[j])
        codes[2 * j] = ((byte & 15) ^ 8) - 8
        codes[2 * j + 1] = ((byte >> 4) ^ 8) - 8
    if codes.size % 2:
        codes[codes.size - 1] = ((np.int32(data[codes.size // 2]) & 15) ^ 8) - 8


@compiled
def round_fp16(values: Any, bits: Any, halves: Any, rounded: Any) -> None:
    """float32 as float16, to nearest, ties to even, and as float32 again; none may be beyond `LARGEST_FP16`.

    Values as numbers and as bit patterns, the other two as bit patterns.
    """
    shifted, back = np.empty(CHUNK_VALUES, np.float32), np.empty(CHUNK_VALUES, np.float32)
    shifted_bits, back_bits = shifted.view(np.uint32), back.view(np.uint32)
    half = np.empty(CHUNK_VALUES, np.uint32)
    for start in range(0, values.size, CHUNK_VALUES):
        stop = min(start + CHUNK_VALUES, values.size)
        numbers, patterns = values[start:stop], bits[start:stop]
        for j in range(numbers.size):
            shifted[j] = abs(numbers[j]) + np.float32(0.5)  # the last bit of a half's subnormals comes last here
            back[j] = shifted[j] - np.float32(0.5)
        for j in range(numbers.size):
            magnitude = patterns[j] & _MAGNITUDE
            normal = (magnitude + _HALF_BIAS + (magnitude >> uint32(13) & uint32(1))) >> uint32(13)
            half[j] = normal if magnitude >= _LEAST_NORMAL_HALF else shifted_bits[j] - _ONE_HALF
        codes, again = halves[start:stop], rounded[start:stop]
        for j in range(numbers.size):
            codes[j] = patterns[j] >> uint32(16) & uint32(0x8000) | half[j]
        for j in range(numbers.size):
            magnitude = patterns[j] & _MAGNITUDE
            seen = (half[j] << uint32(13)) + _EXPONENTS_APART if magnitude >= _LEAST_NORMAL_HALF else back_bits[j]
            again[j] = patterns[j] & ~_MAGNITUDE | seen


@compiled
def round_bf16(bits: Any, rounded: Any) -> None:
    """Each float32 without its lower half, rounded to nearest, ties to even; both as bit patterns."""
    for j in range(bits.size):
        odd = bits[j] >> uint32(16) & uint32(1)
        rounded[j] = (bits[j] + uint32(0x7FFF) + odd) & uint32(0xFFFF0000)
