"""The kernels in plain torch operations, for any device and dtype. The compiled kernels are tested against them.

In comparisons of magnitudes a NaN is larger than everything, so that it is always selected and reaches every rank. A
zero is never selected. Values keep the dtype of the vector they come from. Indices are int32 up to 2^31 - 1 entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Entries = tuple[Tensor, Tensor]
"""Strictly increasing indices, and the values there."""


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest integer type that holds every index of a vector of this length."""
    return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64


def magnitudes(x: Tensor) -> Tensor:
    """|x|, with NaN as infinity: selections use this order."""
    return torch.where(torch.isnan(x), torch.inf, x.abs())


def accumulate(
    residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int, clear: bool
) -> Entries | None:
    """`out = residual + grad`; with `clear` the gradient is then set to zero.

    Returns the entries of the sum that are not below the floor, or None if they were not collected: because there is no
    floor, or because there are more than twice as many as expected.
    """
    torch.add(residual, grad, out=out)
    if clear:
        grad.zero_()
    return None if floor is None else compact(out, floor, expected)


def compact(x: Tensor, floor: float, expected: int) -> Entries:
    """The non-zero entries whose magnitude is not below `floor`. `expected` is an estimate of their number."""
    threshold = torch.tensor(floor, dtype=x.dtype, device=x.device)
    selected = ~(x.abs() < threshold) & (x != 0)
    positions = selected.nonzero().flatten()
    return positions.to(index_dtype(x.numel())), x[positions]


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude, 1 <= k <= numel."""
    return float(magnitudes(x).topk(k).values[-1])


def least_magnitude(x: Tensor) -> float:
    """The smallest magnitude of a vector of at least one entry, with NaN as infinity."""
    return float(magnitudes(x).min())


def all_finite(x: Tensor) -> bool:
    """Whether no entry is infinite or NaN."""
    return bool(torch.isfinite(x).all())


def cut(indices: Tensor, values: Tensor, k: int) -> tuple[Entries, Entries]:
    """The k entries of largest magnitude, and the others. Among equals the lower index comes first."""
    order = _orderable(values).sort(descending=True, stable=True).indices
    kept, dropped = order[:k].sort().values, order[k:].sort().values
    return (indices[kept], values[kept]), (indices[dropped], values[dropped])


def top_of_chunks(x: Tensor, length: int, edges: Tensor) -> Entries:
    """The entries of largest magnitude of each chunk of `length` entries, without zeros; the lower index among equals.

    The share of chunk i is `edges[i + 1] - edges[i]`, at least one and at most the chunk's length. The last chunk may
    be shorter.
    """
    num_chunks = edges.numel() - 1
    keys = _orderable(x)
    padded = keys.new_full((num_chunks * length,), -1)
    padded[: x.numel()] = keys
    keys, order = padded.view(num_chunks, length).sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(length, device=x.device)
    selected = (ranks < edges.diff().to(x.device)[:, None]) & (keys > 0)
    starts = length * torch.arange(num_chunks, device=x.device)
    positions = (starts[:, None] + order)[selected].sort().values
    return positions.to(index_dtype(x.numel())), x[positions]


def sum_runs(runs: Sequence[Entries]) -> Entries:
    """The sum of sorted runs, added in their order. Sums of zero stay: they say that the index was delivered."""
    indices, positions = torch.unique(torch.cat([run[0] for run in runs]), return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=runs[0][1].dtype, device=indices.device)
    start = 0
    for run_indices, run_values in runs:
        # Each run has an index once, so one addition per run is reproducible on any device.
        values[positions[start : start + run_indices.numel()]] += run_values
        start += run_indices.numel()
    return indices, values


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts end to end."""
    return torch.cat(list(parts))


def above(entries: Entries, floor: float) -> Entries:
    """The non-zero entries whose magnitude is not below `floor`."""
    positions, values = compact(entries[1], floor, entries[1].numel())
    return entries[0][positions], values


def shared(indices: Tensor, other: Tensor) -> Tensor:
    """The indices that are also in `other`. Both are sorted."""
    return indices[torch.isin(indices, other, assume_unique=True)]


def exclude(entries: Entries, other: Tensor) -> Entries:
    """The entries whose index is not in the sorted `other`."""
    kept = ~torch.isin(entries[0], other, assume_unique=True)
    return entries[0][kept], entries[1][kept]


def difference(entries: Entries, decoded: Tensor) -> Entries:
    """The values minus the decoded values at the same indices, where they differ."""
    errors = entries[1] - decoded
    kept = errors != 0
    return entries[0][kept], errors[kept]


def difference_at(entries: Entries, decoded: Tensor, other: Tensor) -> Entries:
    """The values minus the decoded values, zeros included, of the entries whose index is in the sorted `other`."""
    shared = torch.isin(entries[0], other, assume_unique=True)
    values, decoded = entries[1][shared], decoded[shared]
    return entries[0][shared], torch.where(values == decoded, 0, values - decoded)


def first_disorder(indices: Tensor, low: int, high: int) -> int:
    """The first position whose index is not in `[low, high)` or not above the one before; -1 if there is none."""
    if indices.numel() == 0:
        return -1
    bad = (indices < low) | (indices >= high)
    bad[1:] |= indices[1:] <= indices[:-1]
    return int(bad.nonzero()[0]) if bool(bad.any()) else -1


def write_sparse_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Overwrite `out` with the given entries, and zeros elsewhere."""
    out.zero_()
    put_(out, indices, values)


def put_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write the values at the given indices."""
    out[indices] = values.to(out.dtype)


def clear_(out: Tensor, indices: Tensor) -> None:
    """Write zeros at the given indices."""
    out[indices] = 0


def settle_(accumulated: Tensor, sent: Entries, leftover: Entries) -> None:
    """Set the entries that were sent to zero, then add the leftover."""
    accumulated[sent[0]] = 0
    accumulated[leftover[0]] += leftover[1].to(accumulated.dtype)


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
    """A step of `LazyAdam`: count the delivered entries, update the means of their squares, move their parameters.

    `weights[n]` is the weight of a new square after n deliveries. Counts do not exceed the length of `weights`.
    """
    before = deliveries[indices]
    deliveries[indices] = (before + 1).clamp(max=weights.numel())
    square = mean_square[indices]
    square += weights[before.clamp(max=weights.numel() - 1).long()] * (values * values - square)
    mean_square[indices] = square
    parameter[indices] -= rate * values / (square.sqrt() + epsilon)


def moments(x: Tensor) -> tuple[float, float]:
    """Mean and standard deviation."""
    wide = x.double()
    return float(wide.mean()), float(wide.std(correction=0))


def sample(x: Tensor, num_entries: int) -> Tensor:
    """About `num_entries` entries, one at a pseudo-random position of each of as many equal stretches.

    A fixed stride could coincide with the rows of a weight matrix, so positions are a hash of the stretch's number.
    """
    stretch = max(1, x.numel() // num_entries)
    numbers = torch.arange(x.numel() // stretch, device=x.device)
    return x[numbers * stretch + (numbers * 2654435761 & 0xFFFFFFFF) % stretch]


def descending_points(values: Tensor, ranks: Tensor) -> Tensor:
    """The magnitudes at the given ranks, where rank 0 is the largest."""
    return magnitudes(values).sort(descending=True).values[ranks.to(values.device)]


def _orderable(values: Tensor) -> Tensor:
    """Bit patterns of the magnitudes: integers in the same order, with NaN as the largest."""
    wide = values if values.dtype == torch.float64 else values.float()
    return wide.abs().view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
