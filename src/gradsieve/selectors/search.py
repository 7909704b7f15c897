"""Finding the k largest magnitudes without sorting: guess a floor, collect what is above it, cut that to k.

A guess that turns out too high costs one more pass; the result is exact either way.
"""

from __future__ import annotations

import math

from torch import Tensor

from gradsieve.kernels import Entries, kernels

SAMPLE_ENTRIES = 1 << 16
SAMPLED_CANDIDATES = 1 << 12  # enough to meet k within a percent
TRIM_FROM = 1.05  # times k; with fewer candidates there is too little to gain
GUESS_DEVIATIONS = 4.0  # how far below the estimate the floor is put; more lets fewer guesses fail, but collects more


def sampled_floor(x: Tensor, k: int) -> float:
    """A magnitude that very likely has at least k entries of x above it, and not many more."""
    picked = kernels(x).sample(x, SAMPLE_ENTRIES)
    rank = k * picked.numel() / x.numel()
    rank = math.ceil(rank + GUESS_DEVIATIONS * math.sqrt(rank)) + 1
    if rank >= picked.numel():
        return 0.0
    return kernels(picked).kth_magnitude(picked, rank)


def reached_by(values: Tensor, count: float) -> float:
    """About the magnitude that so many of these values reach, from a sample of them; the least one if it is all."""
    fast = kernels(values)
    if count >= values.numel():
        return fast.least_magnitude(values)
    picked = fast.sample(values, SAMPLED_CANDIDATES)
    return fast.kth_magnitude(picked, max(1, round(count * picked.numel() / values.numel())))


def trimmed(entries: Entries, k: int) -> Entries:
    """About the k largest of somewhat more entries."""
    values = entries[1]
    if values.numel() <= TRIM_FROM * k:
        return entries
    return kernels(values).above(entries, reached_by(values, k))


def top_entries(x: Tensor, k: int, candidates: Entries | None = None) -> tuple[Entries, float]:
    """The k entries of largest magnitude (fewer if the rest is zero), ties to the lower index, and the k-th magnitude.

    `candidates`, if given, are all entries above some floor, and spare the search if there are at least k.
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
