"""The hot loops over sorted runs of entries, compiled by Numba: no checks here, callers size every buffer.

Two runs at a time would be merged by comparing their heads, and each comparison waits for the one before. Instead the
index space is walked in windows that stay in the cache: entries are put in their places, places are read off.

Positions are unsigned: Numba lets a signed one count from the end, and that test would sit in the chain of every loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from gradsieve.kernels.lanes import count_set, lowest_set

WINDOW_ENTRIES = 4096  # 16 KB of float32: half of a first-level cache
READ_OFF_AT_ONCE = 5  # of 64 places, without asking whether there are so many: a wrong guess costs more than they do

_ONE, _WORD_SHIFT, _BIT_MASK = uint64(1), uint64(6), uint64(63)

_compiled = njit(nogil=True, cache=True)
_inlined = njit(nogil=True, cache=True, inline="always")


@_inlined
def _mark(touched: Any, place: Any) -> None:
    touched[place >> _WORD_SHIFT] |= _ONE << (place & _BIT_MASK)


@_compiled
def sum_runs(indices: Any, values: Any, bounds: Any, out_indices: Any, out_values: Any) -> Any:
    """Add sorted runs, laid end to end between `bounds`, in their order; how many entries the sum has.

    The output needs room for `READ_OFF_AT_ONCE` entries more, since it is written before it is known.
    """
    window = np.zeros(WINDOW_ENTRIES, values.dtype)
    touched = np.zeros(WINDOW_ENTRIES // 64, np.uint64)
    positions = bounds[:-1].copy()
    found = uint64(0)
    while True:
        start = _lowest_index(indices, positions, bounds)
        if start < 0:
            return found
        start -= start % WINDOW_ENTRIES
        alone = _only_run(indices, positions, bounds, start + WINDOW_ENTRIES)
        if alone >= 0:  # nothing to add to: what is rounded away comes from everywhere, or from one region
            first, after = positions[alone], _alone_until(indices, positions, bounds, alone)
            passed = uint64(after - first)
            out_indices[found : found + passed] = indices[first:after]
            out_values[found : found + passed] = values[first:after]
            positions[alone] = after
            found += passed
            continue
        for run in range(positions.size):
            position = uint64(positions[run])
            end = uint64(bounds[run + 1])
            while position < end and indices[position] < start + WINDOW_ENTRIES:
                place = uint64(np.int64(indices[position]) - start)
                window[place] += values[position]
                _mark(touched, place)
                position += _ONE
            positions[run] = np.int64(position)
        for word in range(touched.size):
            bits = touched[word]
            touched[word] = 0
            first, after = uint64(64 * word), found + uint64(count_set(bits))
            for _ in range(READ_OFF_AT_ONCE):
                # Also past the last one: where nothing was put, zero is read and left.
                place = first + (uint64(lowest_set(bits)) & _BIT_MASK)
                out_indices[found] = start + np.int64(place)
                out_values[found] = window[place]
                window[place] = 0
                found += _ONE
                bits &= bits - _ONE
            while bits:
                place = first + uint64(lowest_set(bits))
                out_indices[found] = start + np.int64(place)
                out_values[found] = window[place]
                window[place] = 0
                found += _ONE
                bits &= bits - _ONE
            found = after


@_inlined
def _lowest_index(indices: Any, positions: Any, bounds: Any) -> Any:
    """The lowest index that no run has passed yet; -1 if there is none."""
    lowest = np.int64(-1)
    for run in range(positions.size):
        if positions[run] < bounds[run + 1]:
            index = np.int64(indices[positions[run]])
            if lowest < 0 or index < lowest:
                lowest = index
    return lowest


@_inlined
def _only_run(indices: Any, positions: Any, bounds: Any, stop: Any) -> Any:
    """The one run that has entries before `stop`; -1 if several have."""
    only = -1
    for run in range(positions.size):
        if positions[run] < bounds[run + 1] and indices[positions[run]] < stop:
            if only >= 0:
                return -1
            only = run
    return only


@_inlined
def _alone_until(indices: Any, positions: Any, bounds: Any, alone: Any) -> Any:
    """The position at which the next entry of another run comes before that of this one."""
    low, high = positions[alone], bounds[alone + 1]
    for run in range(positions.size):
        if run != alone and positions[run] < bounds[run + 1]:
            index = indices[positions[run]]
            first, last = low, high
            while first < last:
                middle = (first + last) // 2
                if indices[middle] < index:
                    first = middle + 1
                else:
                    last = middle
            high = first
    return high


@_compiled
def shared(indices: Any, other: Any, out: Any) -> Any:
    """The indices that are in the sorted `other` too; room for one more, since it writes before it knows."""
    touched = np.zeros(WINDOW_ENTRIES // 64, np.uint64)
    found, start, after = uint64(0), np.int64(-WINDOW_ENTRIES), uint64(0)
    for i in range(uint64(indices.size)):
        if indices[i] >= start + WINDOW_ENTRIES:
            start, after = _marked_window(indices[i], other, after, touched)
        out[found] = indices[i]
        found += _is_marked(touched, uint64(np.int64(indices[i]) - start))
    return found


@_compiled
def exclude(indices: Any, values: Any, other: Any, out_indices: Any, out_values: Any) -> Any:
    """The entries whose index is not in the sorted `other`; room for one more, since it writes before it knows."""
    touched = np.zeros(WINDOW_ENTRIES // 64, np.uint64)
    found, start, after = uint64(0), np.int64(-WINDOW_ENTRIES), uint64(0)
    for i in range(uint64(indices.size)):
        if indices[i] >= start + WINDOW_ENTRIES:
            start, after = _marked_window(indices[i], other, after, touched)
        out_indices[found] = indices[i]
        out_values[found] = values[i]
        found += _ONE - _is_marked(touched, uint64(np.int64(indices[i]) - start))
    return found


@_compiled
def rounded_off(indices: Any, values: Any, seen: Any, other: Any, out_indices: Any, out_values: Any) -> Any:
    """Of the entries whose index is in the sorted `other`, the values less what was seen; room for one more."""
    touched = np.zeros(WINDOW_ENTRIES // 64, np.uint64)
    found, start, after = uint64(0), np.int64(-WINDOW_ENTRIES), uint64(0)
    for i in range(uint64(indices.size)):
        if indices[i] >= start + WINDOW_ENTRIES:
            start, after = _marked_window(indices[i], other, after, touched)
        out_indices[found] = indices[i]
        out_values[found] = 0 if values[i] == seen[i] else values[i] - seen[i]
        found += _is_marked(touched, uint64(np.int64(indices[i]) - start))
    return found


@_inlined
def _marked_window(index: Any, indices: Any, position: Any, touched: Any) -> Any:
    """Mark what lies in the window of an index, from a position not beyond it; its start, and the position after it."""
    touched[:] = 0
    start = np.int64(index) - np.int64(index) % WINDOW_ENTRIES
    size = uint64(indices.size)
    while position < size and indices[position] < start:
        position += _ONE
    while position < size and indices[position] < start + WINDOW_ENTRIES:
        _mark(touched, uint64(np.int64(indices[position]) - start))
        position += _ONE
    return start, position


@_inlined
def _is_marked(touched: Any, place: Any) -> Any:
    return touched[place >> _WORD_SHIFT] >> (place & _BIT_MASK) & _ONE


@_compiled
def beyond(indices: Any, values: Any, seen: Any, out_indices: Any, out_values: Any) -> Any:
    """What the values are more than `seen`, where they are; room for one more, since it writes before it knows."""
    found = uint64(0)
    for j in range(indices.size):
        missing = values[j] - seen[j]
        out_indices[found] = indices[j]
        out_values[found] = missing
        found += uint64(missing != 0)
    return found


@_compiled
def above(indices: Any, values: Any, floor: Any, out_indices: Any, out_values: Any) -> Any:
    """The entries that are not below `floor`; room for one more, since it writes before it knows."""
    found = uint64(0)
    for j in range(indices.size):
        out_indices[found] = indices[j]
        out_values[found] = values[j]
        found += uint64(not abs(values[j]) < floor)
    return found


@_inlined
def _rises(indices: Any) -> bool:
    """Whether each index is above the one before. Looks at all of them, many at a time: eight times faster."""
    falls = False
    for position in range(1, indices.size):
        falls |= indices[position] <= indices[position - 1]
    return not falls


@_compiled
def first_disorder(indices: Any, low: int, high: int) -> int:
    """The first position whose index is out of `[low, high)` or not above the one before; -1 if there is none."""
    if indices.size == 0 or (_rises(indices) and indices[0] >= low and indices[-1] < high):
        return -1
    previous = np.int64(low) - 1
    for position in range(indices.size):
        index = np.int64(indices[position])
        if index <= previous or index >= high:
            return position
        previous = index
    return -1
