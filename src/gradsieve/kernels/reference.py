"""The kernels in plain torch operations, for any device and dtype: the definition the fast ones are tested against.

Magnitude comparisons count a NaN as larger than anything, so that it is always picked and seen by every rank, and
never pick a zero. Values keep the dtype of the vector they come from; indices are int32 up to 2^31 - 1 entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Entries = tuple[Tensor, Tensor]
"""Indices, strictly increasing, and their values."""


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest integer type that holds every index of a vector of this length."""
    return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64


def magnitudes(x: Tensor) -> Tensor:
    """|x| with NaN as infinity's successor: the order all selections use."""
    return torch.where(torch.isnan(x), torch.inf, x.abs())


def accumulate(
    residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int, clear: bool
) -> Entries | None:
    """`out = residual + grad`; with a floor, also the entries of the sum that are not below it.

    About `expected` of them are looked for: if there are twice as many and more, None may come instead. With `clear`
    the gradient is zero afterwards.
    """
    torch.add(residual, grad, out=out)
    if clear:
        grad.zero_()
    return None if floor is None else compact(out, floor, expected)


def compact(x: Tensor, floor: float, expected: int) -> Entries:
    """The non-zero entries whose magnitude is not below `floor`; `expected` is a guess at how many there are."""
    threshold = torch.tensor(floor, dtype=x.dtype, device=x.device)
    picked = ~(x.abs() < threshold) & (x != 0)
    positions = picked.nonzero().flatten()
    return positions.to(index_dtype(x.numel())), x[positions]


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude, 1 <= k <= numel."""
    return float(magnitudes(x).topk(k).values[-1])


def least_magnitude(x: Tensor) -> float:
    """The smallest magnitude of at least one entry, NaN as infinity."""
    return float(magnitudes(x).min())


def all_finite(x: Tensor) -> bool:
    """Whether no entry is infinite or NaN."""
    return bool(torch.isfinite(x).all())


def cut(indices: Tensor, values: Tensor, k: int) -> tuple[Entries, Entries]:
    """The k entries of largest magnitude, and the others; among equals the lower index is kept."""
    order = _orderable(values).sort(descending=True, stable=True).indices
    kept, dropped = order[:k].sort().values, order[k:].sort().values
    return (indices[kept], values[kept]), (indices[dropped], values[dropped])


def top_of_chunks(x: Tensor, length: int, edges: Tensor) -> Entries:
    """Of each chunk of `length` entries, its share of largest magnitudes; zeros never, ties to the lower index.

    The share of chunk i is `edges[i + 1] - edges[i]`, at least one and at most the chunk. The last may be shorter.
    """
    num_chunks = edges.numel() - 1
    keys = _orderable(x)
    padded = keys.new_full((num_chunks * length,), -1)
    padded[: x.numel()] = keys
    keys, order = padded.view(num_chunks, length).sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(length, device=x.device)
    picked = (ranks < edges.diff().to(x.device)[:, None]) & (keys > 0)
    starts = length * torch.arange(num_chunks, device=x.device)
    positions = (starts[:, None] + order)[picked].sort().values
    return positions.to(index_dtype(x.numel())), x[positions]


def sum_runs(runs: Sequence[Entries]) -> Entries:
    """The sum of sorted runs, added in their order. Sums that cancel stay: they tell that the index was delivered."""
    indices, places = torch.unique(torch.cat([run[0] for run in runs]), return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=runs[0][1].dtype, device=indices.device)
    start = 0
    for run_indices, run_values in runs:
        # Each run has an index once, so one addition a run is exact and repeatable, on any device.
        values[places[start : start + run_indices.numel()]] += run_values
        start += run_indices.numel()
    return indices, values


def joined(parts: Sequence[Tensor]) -> Tensor:
    """End to end."""
    return torch.cat(list(parts))


def above(entries: Entries, floor: float) -> Entries:
    """The non-zero entries whose magnitude is not below `floor`."""
    positions, values = compact(entries[1], floor, entries[1].numel())
    return entries[0][positions], values


def shared(indices: Tensor, other: Tensor) -> Tensor:
    """The indices that are in `other` too; both are sorted."""
    return indices[torch.isin(indices, other, assume_unique=True)]


def exclude(entries: Entries, other: Tensor) -> Entries:
    """The entries whose index is not in the sorted `other`."""
    kept = ~torch.isin(entries[0], other, assume_unique=True)
    return entries[0][kept], entries[1][kept]


def beyond(entries: Entries, seen: Tensor) -> Entries:
    """The entries less what was seen of them, where that differs."""
    missing = entries[1] - seen
    kept = missing != 0
    return entries[0][kept], missing[kept]


def rounded_off(entries: Entries, seen: Tensor, other: Tensor) -> Entries:
    """Of the entries whose index is in the sorted `other`, what was not seen of them, zeros included."""
    shared = torch.isin(entries[0], other, assume_unique=True)
    values, seen = entries[1][shared], seen[shared]
    return entries[0][shared], torch.where(values == seen, 0, values - seen)


def first_disorder(indices: Tensor, low: int, high: int) -> int:
    """The first position whose index is out of `[low, high)` or not above the one before; -1 if there is none."""
    if indices.numel() == 0:
        return -1
    bad = (indices < low) | (indices >= high)
    bad[1:] |= indices[1:] <= indices[:-1]
    return int(bad.nonzero()[0]) if bool(bad.any()) else -1


def write_sparse_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """`out` becomes zero but for the given entries."""
    out.zero_()
    put_(out, indices, values)


def put_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """`out` becomes the given values at the given indices."""
    out[indices] = values.to(out.dtype)


def clear_(out: Tensor, indices: Tensor) -> None:
    """`out` becomes zero at the given indices."""
    out[indices] = 0


def settle_(accumulated: Tensor, sent: Entries, leftover: Entries) -> None:
    """Take off what was sent (it is what stands there), then add back what was not delivered."""
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
    """A step of `LazyAdam`: count the delivered entries, take their squares into the means, move their parameters.

    `weights` has a new square's share of the mean, by how many came before; counting ends at its length.
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
    """About `num_entries` entries, one from each of as many equal stretches, at places that follow no pattern in x.

    A fixed stride could fall in step with the rows of a weight matrix, hence the hash of the stretch's number.
    """
    stretch = max(1, x.numel() // num_entries)
    numbers = torch.arange(x.numel() // stretch, device=x.device)
    return x[numbers * stretch + (numbers * 2654435761 & 0xFFFFFFFF) % stretch]


def descending_points(values: Tensor, ranks: Tensor) -> Tensor:
    """The magnitudes at the given ranks, 0 being the largest."""
    return magnitudes(values).sort(descending=True).values[ranks.to(values.device)]


def _orderable(values: Tensor) -> Tensor:
    """Bit patterns of the magnitudes: integers that sort as they do, with NaN on top."""
    wide = values if values.dtype == torch.float64 else values.float()
    return wide.abs().view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
