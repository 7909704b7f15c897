"""Finds the k largest magnitudes without sorting: estimate a floor, collect the entries above it, cut these to k.

A floor that is too high costs one more pass. The result is exact either way.
"""

from __future__ import annotations

import math

from torch import Tensor

from gradsieve.kernels import Entries, kernels

SAMPLE_ENTRIES = 1 << 16  # of a vector; more estimates the floor better, and costs more
SAMPLED_CANDIDATES = 1 << 12  # enough to meet k within a percent
TRIM_FROM = 1.05  # times k; with fewer candidates there is too little to gain
GUESS_DEVIATIONS = 4.0  # standard deviations from the estimate to the floor; more fails less often, and collects more


def sampled_floor(x: Tensor, k: int) -> float:
    """Return a magnitude that very likely at least k entries of x reach, and not many more."""
    sample = kernels(x).sample(x, SAMPLE_ENTRIES)
    rank = k * sample.numel() / x.numel()
    rank = math.ceil(rank + GUESS_DEVIATIONS * math.sqrt(rank)) + 1
    if rank >= sample.numel():
        return 0.0
    return kernels(sample).kth_magnitude(sample, rank)


def reached_by(values: Tensor, count: float) -> float:
    """Return about the magnitude that `count` of the values reach, from a sample; the least one if that is all."""
    fast = kernels(values)
    if count >= values.numel():
        return fast.least_magnitude(values)
    sample = fast.sample(values, SAMPLED_CANDIDATES)
    return fast.kth_magnitude(sample, max(1, round(count * sample.numel() / values.numel())))


def trimmed(entries: Entries, k: int) -> Entries:
    """Return about the k largest of slightly more entries."""
    values = entries[1]
    if values.numel() <= TRIM_FROM * k:
        return entries
    return kernels(values).above(entries, reached_by(values, k))


def top_entries(x: Tensor, k: int, candidates: Entries | None = None) -> tuple[Entries, float]:
    """Return the k entries of largest magnitude (fewer if the rest is zero), and the k-th magnitude.

    Of equal magnitudes the lower index is selected. `candidates`, if given, are all entries above some floor. They save
    the search if there are at least k.
    """
    fast = kernels(x)
    if k >= x.numel():
        return fast.compact(x, 0.0, k), 0.0
    if candidates is None or candidates[0].numel() < k:
        candidates = fast.compact(x, sampled_floor(x, k), k + k // 4)
    if candidates[0].numel() < k:
        candidates = fast.compact(x, fast.kth_magnitude(x, k), k)
    if candidates[0].numel() < k:
        return candidates, 0.0
    kept, _ = fast.cut(*candidates, k)
    return kept, fast.least_magnitude(kept[1])
