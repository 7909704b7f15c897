"""Values in fewer bits: without loss by leaving out common leading bits, or rounded to a few levels; compiled.

A rounding loop writes to `rounded` the values that the reading loop will give, bit for bit, on any machine: both
compute them by one float32 multiplication.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32, uint64

from gradsieve.kernels.bits import ONE, compiled, get

CHUNK_VALUES = 128  # values per scale: fewer fits the scale closer, but sends more scales

_MAGNITUDE = uint32(0x7FFFFFFF)
_SIGN_SHIFT = uint32(31)
_LEAST_NORMAL_HALF = uint32(0x38800000)  # 2 to the -14, as a float32
_HALF_BIAS = uint32((0xFFF - (112 << 23)) & 0xFFFFFFFF)  # the difference of the exponents' biases, and rounding
_EXPONENTS_APART = uint32(112 << 23)
_ONE_HALF = uint32(0x3F000000)
_LEAST_STEP = np.finfo(np.float32).tiny  # below this, 1 / step is infinite

# The largest magnitudes that do not round to infinity.
LARGEST_BF16 = float(np.array([0x7F7F7FFF], np.uint32).view(np.float32)[0])
LARGEST_FP16 = 65519.0


@compiled
def magnitude_span(bits: Any) -> tuple[Any, Any]:
    """The least and the greatest magnitude of float32 values, as bit patterns, which are ordered as magnitudes are."""
    least, greatest = _MAGNITUDE, uint32(0)
    for j in range(bits.size):
        magnitude = bits[j] & _MAGNITUDE
        least = min(least, magnitude)
        greatest = max(greatest, magnitude)
    return least, greatest


@compiled
def encode_narrow(bits: Any, shift: int, base: int, width: int, words: Any) -> None:
    """Write per value, in `width` bits, its sign and its magnitude without the `shift` low bits, minus `base`."""
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
    """Read what `encode_narrow` wrote. `words` has at least one word more than the values take."""
    mask = (ONE << uint64(width)) - ONE
    offset, bit, dropped = uint64(base), uint64(0), uint32(shift)
    for j in range(bits.size):
        field = get(words, bit, mask)
        bit += uint64(width)
        bits[j] = ((uint32(offset + (field >> ONE)) << dropped) & _MAGNITUDE) | (uint32(field & ONE) << _SIGN_SHIFT)


@compiled
def encode_levels(values: Any, bits: Any, levels: int, steps: Any, codes: Any, rounded: Any) -> None:
    """The nearest multiple of a step, from `-levels` to `levels`. The chunk's greatest magnitude is `levels` steps.

    `bits` are the bit patterns of the float32 values: the compiler vectorizes comparisons of integers. It also needs
    loops that do one thing each.
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
            rounded[j] = np.float32(codes[j]) * step  # from the integer, which has no negative zero


@compiled
def decode_levels(steps: Any, codes: Any, values: Any) -> None:
    """`values = codes * steps`."""
    for chunk in range(steps.size):
        step = steps[chunk]
        start = chunk * CHUNK_VALUES
        for j in range(start, min(start + CHUNK_VALUES, values.size)):
            values[j] = np.float32(codes[j]) * step


@compiled
def pack_nibbles(codes: Any, data: Any) -> None:
    """Write two codes per byte, the first in the low half. After an odd number of codes the last high half is zero."""
    for j in range(codes.size // 2):
        data[j] = np.uint8(codes[2 * j]) & np.uint8(15) | np.uint8(codes[2 * j + 1]) << np.uint8(4)
    if codes.size % 2:
        data[codes.size // 2] = np.uint8(codes[codes.size - 1]) & np.uint8(15)


@compiled
def unpack_nibbles(data: Any, codes: Any) -> None:
    """Read what `pack_nibbles` wrote, with signs."""
    for j in range(codes.size // 2):
        byte = np.int32(data[j])
        codes[2 * j] = ((byte & 15) ^ 8) - 8
        codes[2 * j + 1] = ((byte >> 4) ^ 8) - 8
    if codes.size % 2:
        codes[codes.size - 1] = ((np.int32(data[codes.size // 2]) & 15) ^ 8) - 8


@compiled
def round_fp16(values: Any, bits: Any, halves: Any, rounded: Any) -> None:
    """Round float32 to float16, to nearest, ties to even, and back. No magnitude may be above `LARGEST_FP16`.

    `values` are given as numbers and as bit patterns, `halves` and `rounded` are written as bit patterns.
    """
    shifted, back = np.empty(CHUNK_VALUES, np.float32), np.empty(CHUNK_VALUES, np.float32)
    shifted_bits, back_bits = shifted.view(np.uint32), back.view(np.uint32)
    half = np.empty(CHUNK_VALUES, np.uint32)
    for start in range(0, values.size, CHUNK_VALUES):
        stop = min(start + CHUNK_VALUES, values.size)
        numbers, patterns = values[start:stop], bits[start:stop]
        for j in range(numbers.size):
            shifted[j] = abs(numbers[j]) + np.float32(0.5)  # the sum's last bit is that of float16's subnormals
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
    """Round float32 to its upper 16 bits, to nearest, ties to even; both as bit patterns."""
    for j in range(bits.size):
        odd = bits[j] >> uint32(16) & uint32(1)
        rounded[j] = (bits[j] + uint32(0x7FFF) + odd) & uint32(0xFFFF0000)
