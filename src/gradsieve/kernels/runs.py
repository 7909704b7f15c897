"""The hot loops over sorted entries, compiled by Numba. They check nothing: callers size every buffer.

Merging two sorted lists compares their heads, and each comparison waits for the one before. Instead, these loops go
through the index space in windows that stay in the cache. Entries are written to their offset in the window, and the
window is then read in order.

Positions are unsigned: Numba lets a signed position count from the end, and testing for that would slow every loop.

Most loops write an entry before they decide whether it counts, which avoids a branch. Their outputs need room for one
more entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from gradsieve.kernels.lanes import count_set, lowest_set

WINDOW_ENTRIES = 4096  # 16 KB of float32: half of a first-level cache
READ_AT_ONCE = 5  # entries per 64 offsets that are read without a branch: a misprediction costs more than they do

_ONE, _WORD_SHIFT, _BIT_MASK = uint64(1), uint64(6), uint64(63)

_compiled = njit(nogil=True, cache=True)
_inlined = njit(nogil=True, cache=True, inline="always")


@_inlined
def _mark(touched: Any, offset: Any) -> None:
    touched[offset >> _WORD_SHIFT] |= _ONE << (offset & _BIT_MASK)


@_compiled
def sum_runs(indices: Any, values: Any, bounds: Any, out_indices: Any, out_values: Any) -> Any:
    """Add sorted runs, stored end to end between `bounds`, in their order; returns the number of entries of the sum.

    The output needs room for `READ_AT_ONCE` more entries.
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
        if alone >= 0:  # one run is copied: rounding errors of different runs are often far apart
            after = _alone_until(indices, positions, bounds, alone)
            # Not by slices: the check that two slices have the same length takes seconds to compile.
            for position in range(uint64(positions[alone]), uint64(after)):
                out_indices[found] = indices[position]
                out_values[found] = values[position]
                found += _ONE
            positions[alone] = after
            continue
        for run in range(positions.size):
            position = uint64(positions[run])
            end = uint64(bounds[run + 1])
            while position < end and indices[position] < start + WINDOW_ENTRIES:
                offset = uint64(np.int64(indices[position]) - start)
                window[offset] += values[position]
                _mark(touched, offset)
                position += _ONE
            positions[run] = np.int64(position)
        found = _read_window(window, touched, start, found, out_indices, out_values)


@_inlined
def _read_window(window: Any, touched: Any, start: Any, found: Any, out_indices: Any, out_values: Any) -> Any:
    """Write the marked entries of a window to the output, and clear it; returns the number of entries so far."""
    for word in range(touched.size):
        bits = touched[word]
        touched[word] = 0
        first, after = uint64(64 * word), found + uint64(count_set(bits))
        for _ in range(READ_AT_ONCE):
            # May read past the last entry: the window is zero there, and stays zero.
            offset = first + (uint64(lowest_set(bits)) & _BIT_MASK)
            out_indices[found] = start + np.int64(offset)
            out_values[found] = window[offset]
            window[offset] = 0
            found += _ONE
            bits &= bits - _ONE
        while bits:
            offset = first + uint64(lowest_set(bits))
            out_indices[found] = start + np.int64(offset)
            out_values[found] = window[offset]
            window[offset] = 0
            found += _ONE
            bits &= bits - _ONE
        found = after
    return found


@_inlined
def _lowest_index(indices: Any, positions: Any, bounds: Any) -> Any:
    """The lowest index that remains in any run; -1 if there is none."""
    lowest = np.int64(-1)
    for run in range(positions.size):
        if positions[run] < bounds[run + 1]:
            index = np.int64(indices[positions[run]])
            if lowest < 0 or index < lowest:
                lowest = index
    return lowest


@_inlined
def _only_run(indices: Any, positions: Any, bounds: Any, stop: Any) -> Any:
    """The only run that has remaining entries before `stop`; -1 if several runs have."""
    only = -1
    for run in range(positions.size):
        if positions[run] < bounds[run + 1] and indices[positions[run]] < stop:
            if only >= 0:
                return -1
            only = run
    return only


@_inlined
def _alone_until(indices: Any, positions: Any, bounds: Any, alone: Any) -> Any:
    """The position of this run's first entry that is not before all remaining entries of the other runs."""
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
    """The indices that are also in the sorted `other`; returns how many."""
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
    """The entries whose index is not in the sorted `other`; returns how many."""
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
def difference_at(indices: Any, values: Any, decoded: Any, other: Any, out_indices: Any, out_values: Any) -> Any:
    """`values - decoded` of the entries whose index is in the sorted `other`; returns how many."""
    touched = np.zeros(WINDOW_ENTRIES // 64, np.uint64)
    found, start, after = uint64(0), np.int64(-WINDOW_ENTRIES), uint64(0)
    for i in range(uint64(indices.size)):
        if indices[i] >= start + WINDOW_ENTRIES:
            start, after = _marked_window(indices[i], other, after, touched)
        out_indices[found] = indices[i]
        out_values[found] = 0 if values[i] == decoded[i] else values[i] - decoded[i]
        found += _is_marked(touched, uint64(np.int64(indices[i]) - start))
    return found


@_inlined
def _marked_window(index: Any, indices: Any, position: Any, touched: Any) -> Any:
    """Mark the indices in the window of an index; returns the window's start, and the position after the window."""
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
def _is_marked(touched: Any, offset: Any) -> Any:
    return touched[offset >> _WORD_SHIFT] >> (offset & _BIT_MASK) & _ONE


@_compiled
def difference(indices: Any, values: Any, decoded: Any, out_indices: Any, out_values: Any) -> Any:
    """`values - decoded` where they differ; returns how many."""
    found = uint64(0)
    for j in range(indices.size):
        error = values[j] - decoded[j]
        out_indices[found] = indices[j]
        out_values[found] = error
        found += uint64(error != 0)
    return found


@_compiled
def above(indices: Any, values: Any, floor: Any, out_indices: Any, out_values: Any) -> Any:
    """The entries that are not below `floor`; returns how many."""
    found = uint64(0)
    for j in range(indices.size):
        out_indices[found] = indices[j]
        out_values[found] = values[j]
        found += uint64(not abs(values[j]) < floor)
    return found


@_inlined
def _rises(indices: Any) -> bool:
    """Whether each index is above the one before. Has no early exit, so that it is vectorized: eight times faster."""
    falls = False
    for position in range(1, indices.size):
        falls |= indices[position] <= indices[position - 1]
    return not falls


@_compiled
def first_disorder(indices: Any, low: int, high: int) -> int:
    """The first position whose index is not in `[low, high)` or not above the one before; -1 if there is none."""
    if indices.size == 0 or (_rises(indices) and indices[0] >= low and indices[-1] < high):
        return -1
    previous = np.int64(low) - 1
    for position in range(indices.size):
        index = np.int64(indices[position])
        if index <= previous or index >= high:
            return position
        previous = index
    return -1
