"""The kernels for float32 and float64 on the CPU: Numba loops with the signatures of `reference`.

`reference` documents each function. Long passes are shared by several threads (see `threads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.kernels import chunks, loops
from gradsieve.kernels import runs as sorted_runs
from gradsieve.kernels.lanes import LANES, STORE_ALIGNMENT_BYTES
from gradsieve.kernels.reference import Entries, index_dtype
from gradsieve.kernels.threads import chunk_bounds, in_threads

DTYPES = (torch.float32, torch.float64)

Array = np.ndarray[Any, np.dtype[Any]]

_LARGEST_KEYS = {  # bit patterns of the largest finite magnitudes, by the number of bits without the sign
    31: np.float32(np.finfo(np.float32).max).view(np.int32),
    63: np.float64(np.finfo(np.float64).max).view(np.int64),
}


def accumulate(
    residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int, clear: bool
) -> Entries | None:
    a, b, target = residual.numpy(), grad.numpy(), out.numpy()
    threshold = _floor(torch.inf if floor is None else floor, target.dtype)

    def collect(start: int, stop: int, indices: Array, values: Array) -> int:
        part = target[start:stop]
        vectors = a[start:stop], b[start:stop], part
        return int(loops.accumulate(*vectors, _head(part), threshold, clear, start, indices, values))

    collected = _collect(collect, out, 0 if floor is None else 2 * _room(expected))
    return None if floor is None else collected.entries


def compact(x: Tensor, floor: float, expected: int) -> Entries:
    source = x.numpy()
    threshold = _floor(floor, source.dtype)

    def collect(start: int, stop: int, indices: Array, values: Array) -> int:
        return int(loops.compact(source[start:stop], threshold, start, indices, values))

    entries, needed = _collect(collect, x, _room(expected))
    return compact(x, floor, needed) if entries is None else entries


def kth_magnitude(x: Tensor, k: int) -> float:
    bits, key_mask, key_bits = _keys(x)
    key, _ = loops.kth_key(bits, k, key_mask, key_bits)
    value = float(np.array([key], dtype=bits.dtype).view(x.numpy().dtype)[0])
    return torch.inf if np.isnan(value) else value


def least_magnitude(x: Tensor) -> float:
    """With NumPy: torch starts threads for it, and then waits for a busy core."""
    return float(np.fmin.reduce(np.abs(x.numpy()), initial=torch.inf))


def all_finite(x: Tensor) -> bool:
    """torch and NumPy would write a boolean per entry first."""
    bits, key_mask, key_bits = _keys(x)
    return bool(loops.all_below(bits, key_mask, _LARGEST_KEYS[key_bits]))


def cut(indices: Tensor, values: Tensor, k: int) -> tuple[Entries, Entries]:
    numel = values.numel()
    if k >= numel:
        return (indices, values), (indices[:0], values[:0])
    if k <= 0:
        return (indices[:0], values[:0]), (indices, values)
    bits, key_mask, key_bits = _keys(values)
    kth, ties = loops.kth_key(bits, k, key_mask, key_bits)
    # The loop writes an entry before it decides whether to keep it, and so needs room for one more.
    kept, dropped = _empty_like(indices, values, k + 1), _empty_like(indices, values, numel - k + 1)
    loops.cut(*_arrays(indices, values), bits, key_mask, kth, ties, *_arrays(*kept), *_arrays(*dropped))
    return (kept[0][:k], kept[1][:k]), (dropped[0][:-1], dropped[1][:-1])


def top_of_chunks(x: Tensor, length: int, edges: Tensor) -> Entries:
    source, bounds, (bits, key_mask, key_bits) = x.numpy(), edges.numpy(), _keys(x)
    out = torch.empty(int(bounds[-1]), dtype=index_dtype(x.numel())), torch.empty(int(bounds[-1]), dtype=x.dtype)
    filled: dict[int, slice] = {}  # the slice of `out` that each thread has filled

    def select(part: int, start: int, stop: int) -> None:
        first, last = -(-start // length), -(-stop // length)  # the chunks that begin in this part
        if first == last:
            return
        entries, shares = slice(first * length, last * length), bounds[first : last + 1]
        room = _arrays(*(each[shares[0] : shares[-1]] for each in out))
        vectors = source[entries], bits[entries]
        found = int(chunks.select(*vectors, key_mask, key_bits, length, first * length, shares, *room))
        filled[part] = slice(int(shares[0]), int(shares[0]) + found)

    in_threads(select, x.numel())
    parts = [filled[part] for part in sorted(filled)]
    if sum(part.stop - part.start for part in parts) == bounds[-1]:
        return out
    return joined([out[0][part] for part in parts]), joined([out[1][part] for part in parts])


def sum_runs(runs: Sequence[Entries]) -> Entries:
    if len(runs) == 1:
        return runs[0]
    indices, values = joined([run[0] for run in runs]), joined([run[1] for run in runs])
    bounds = np.cumsum([0] + [run[0].numel() for run in runs])
    out = _empty_like(indices, values, indices.numel() + sorted_runs.READ_AT_ONCE)
    found = sorted_runs.sum_runs(*_arrays(indices, values), bounds, *_arrays(*out))
    return out[0][:found], out[1][:found]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """With NumPy: `torch.cat` starts threads even for short vectors, and then waits for a busy core."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))


def above(entries: Entries, floor: float) -> Entries:
    out = _empty_like(*entries, entries[0].numel() + 1)  # the loop writes an entry before it decides
    threshold = _floor(floor, entries[1].numpy().dtype)
    found = sorted_runs.above(*_arrays(*entries), threshold, *_arrays(*out))
    return out[0][:found], out[1][:found]


def shared(indices: Tensor, other: Tensor) -> Tensor:
    out = torch.empty(indices.numel() + 1, dtype=indices.dtype)  # the loop writes an entry before it decides
    return out[: sorted_runs.shared(indices.numpy(), other.numpy(), out.numpy())]


def exclude(entries: Entries, other: Tensor) -> Entries:
    out = _empty_like(*entries, entries[0].numel() + 1)  # the loop writes an entry before it decides
    found = sorted_runs.exclude(*_arrays(*entries), other.numpy(), *_arrays(*out))
    return out[0][:found], out[1][:found]


def difference(entries: Entries, decoded: Tensor) -> Entries:
    out = _empty_like(*entries, entries[0].numel() + 1)  # the loop writes an entry before it decides
    found = sorted_runs.difference(*_arrays(*entries), decoded.numpy(), *_arrays(*out))
    return out[0][:found], out[1][:found]


def difference_at(entries: Entries, decoded: Tensor, other: Tensor) -> Entries:
    out = _empty_like(*entries, entries[0].numel() + 1)  # the loop writes an entry before it decides
    found = sorted_runs.difference_at(*_arrays(*entries), decoded.numpy(), other.numpy(), *_arrays(*out))
    return out[0][:found], out[1][:found]


def first_disorder(indices: Tensor, low: int, high: int) -> int:
    return int(sorted_runs.first_disorder(indices.numpy(), low, high))


def write_sparse_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    target, (positions, entries) = out.numpy(), _arrays(indices, values.to(out.dtype))

    def write(chunk: int, start: int, stop: int) -> None:
        part = target[start:stop]
        first, last = np.searchsorted(positions, [start, stop])
        loops.write_sparse(part, _head(part), start, positions[first:last], entries[first:last])

    in_threads(write, out.numel())


def put_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    loops.put(out.numpy(), *_arrays(indices, values.to(out.dtype)))


def clear_(out: Tensor, indices: Tensor) -> None:
    loops.clear(out.numpy(), indices.numpy())


def settle_(accumulated: Tensor, sent: Entries, leftover: Entries) -> None:
    loops.settle(accumulated.numpy(), *_arrays(*sent), *_arrays(leftover[0], leftover[1].to(accumulated.dtype)))


def move_delivered_(
    parameter: Tensor,
    mean_square: Tensor,
    deliveries: Tensor,
    indices: Tensor,
    values: Tensor,
    weights: Tensor,
    rate: float,
    epsilon: float,
) -> None:
    target, entries = parameter.numpy(), _arrays(indices, values)
    number = target.dtype.type
    state = mean_square.numpy(), deliveries.numpy()
    loops.move_delivered(target, *state, *entries, weights.numpy(), number(rate), number(epsilon))


def moments(x: Tensor) -> tuple[float, float]:
    source = x.numpy()
    sums = np.zeros((len(chunk_bounds(x.numel())) - 1, 2))

    def sum_part(chunk: int, start: int, stop: int) -> None:
        sums[chunk] = loops.moments(source[start:stop])

    in_threads(sum_part, x.numel())
    mean, mean_square = (float(moment) / x.numel() for moment in sums.sum(axis=0))
    return mean, max(mean_square - mean * mean, 0.0) ** 0.5


def sample(x: Tensor, num_entries: int) -> Tensor:
    stretch = max(1, x.numel() // num_entries)
    out = torch.empty(x.numel() // stretch, dtype=x.dtype)
    loops.sample(x.numpy(), stretch, out.numpy())
    return out


def descending_points(values: Tensor, ranks: Tensor) -> Tensor:
    ordered = np.abs(values.numpy())
    ordered.sort()  # NumPy's vectorized sort, NaN last; torch's sort takes several times as long
    points = ordered[ordered.size - 1 - ranks.numpy()]
    points[np.isnan(points)] = np.inf
    return torch.from_numpy(points)


def _floor(floor: float, dtype: np.dtype[Any]) -> Any:
    """At least the smallest positive number, so that zeros are never selected."""
    return max(dtype.type(floor), np.nextafter(dtype.type(0), dtype.type(1)))


def _room(expected: int) -> int:
    """Room for more entries than expected: if it does not suffice, a second pass is needed."""
    return expected + expected // 4 + 256


def _head(part: Array) -> int:
    """The number of entries before the first one that is aligned for streaming stores."""
    gap = -part.ctypes.data % STORE_ALIGNMENT_BYTES
    return min(gap // part.itemsize, part.size)


def _keys(x: Tensor) -> tuple[Array, Any, int]:
    """Bit patterns, the mask that removes the sign, and the number of bits without it."""
    key_bits = 8 * x.element_size() - 1
    integer = np.int32 if key_bits < 32 else np.int64
    return x.numpy().view(integer), integer((1 << key_bits) - 1), key_bits


def _arrays(indices: Tensor, values: Tensor) -> tuple[Array, Array]:
    return indices.numpy(), values.numpy()


def _empty_like(indices: Tensor, values: Tensor, numel: int) -> Entries:
    return torch.empty(numel, dtype=indices.dtype), torch.empty(numel, dtype=values.dtype)


class _Collected(NamedTuple):
    entries: Entries | None  # None if there was not enough room
    needed: int  # the largest number of entries in one chunk


def _collect(collect: Callable[[int, int, Array, Array], int], x: Tensor, room: int) -> _Collected:
    """Run a collecting loop over all chunks, each of which has room for `room` entries."""
    chunks = len(chunk_bounds(x.numel())) - 1
    share = room + LANES  # per chunk: all large entries may be in one
    indices = torch.empty((chunks, share), dtype=index_dtype(x.numel()))
    values = torch.empty((chunks, share), dtype=x.dtype)
    found = [0] * chunks

    def run(chunk: int, start: int, stop: int) -> None:
        found[chunk] = collect(start, stop, *_arrays(indices[chunk], values[chunk]))

    in_threads(run, x.numel())
    if max(found) > share - LANES:
        return _Collected(None, max(found))
    if chunks == 1:
        return _Collected((indices[0, : found[0]], values[0, : found[0]]), found[0])
    parts = [(indices[chunk, :count], values[chunk, :count]) for chunk, count in enumerate(found)]
    return _Collected((joined([part[0] for part in parts]), joined([part[1] for part in parts])), max(found))
