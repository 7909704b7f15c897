"""Gaussian-k (Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019), corrected.

Gradients are bell-shaped, so mean and standard deviation tell where the largest k of n begin. Real ones have heavier
tails, so:
1. The threshold is where a normal distribution of that mean and deviation has k/n of its mass beyond, on both sides.
2. It is moved, by bisection on a sample, until about k entries are expected above it.
3. What is above it is picked. Above `band` the picked are cut to k; below it the threshold is lowered by what the
   count says and the pass repeated, a few times at most, then the exact k-th magnitude serves.
The published correction (three steps of x0.5 or x1.5) misses k by up to 24 times on heavy tails: see `gaussian_paper`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.selectors.search import top_entries
from gradsieve.vector import SparseVector

BISECTIONS = 12  # of a range of 64 to 1: a thousandth of the threshold


def normal_threshold(mean: float, deviation: float, fraction: float) -> float:
    """The t for which |x| > t has the given probability, for normal x; exact also when the mean is not zero."""
    if not math.isfinite(mean) or not math.isfinite(deviation):
        return math.inf  # something is not finite: pick that, and only that
    if deviation == 0:
        return abs(mean)
    standard = NormalDist()
    low, high = 0.0, abs(mean) + deviation * 40
    for _ in range(60):
        middle = (low + high) / 2
        beyond = standard.cdf((mean - middle) / deviation) + standard.cdf((-mean - middle) / deviation)
        low, high = (middle, high) if beyond > fraction else (low, middle)
    return low


@dataclass(frozen=True)
class Gaussian(Stateless):
    """Picks what lies beyond a threshold derived from mean and standard deviation."""

    band: tuple[float, float] = (
        0.85,
        1.2,
    )  # counts (in k) that need no correction; narrower costs more passes
    sample_entries: int = 1 << 17  # entries the correction looks at; more holds the band closer, costs more
    max_passes: int = 4  # passes over the data before the exact magnitude is computed

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        fast = kernels(accumulated)
        fraction = k / accumulated.numel()
        threshold = normal_threshold(*fast.moments(accumulated), fraction)
        if math.isfinite(threshold):
            threshold = self._corrected(accumulated, threshold, fraction)
        return SparseVector.trusted(self._pick(accumulated, k, threshold), accumulated.numel()), state

    def _corrected(self, x: Tensor, threshold: float, fraction: float) -> float:
        """Bisect between a quarter and sixteen times the threshold for the wanted fraction of a sample."""
        magnitudes = kernels(x).sample(x, self.sample_entries).abs()
        wanted = fraction * magnitudes.numel()
        low, high = threshold / 4, threshold * 16
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            if int((magnitudes >= middle).sum()) > wanted:
                low = middle
            else:
                high = middle
        return low

    def _pick(self, x: Tensor, k: int, threshold: float) -> Entries:
        fast = kernels(x)
        for _ in range(self.max_passes):
            entries = fast.compact(x, threshold, k)
            count = entries[0].numel()
            if count > self.band[1] * k:
                return fast.cut(*entries, k)[0]
            if count >= self.band[0] * k or not math.isfinite(threshold) or threshold < torch.finfo(x.dtype).tiny:
                return entries
            # Tails fall at least as fast as t^-3 here: this lowers enough, and what is too many is cut.
            threshold *= max(0.25, (max(count, 1) / (1.1 * k)) ** (1 / 3))
        return top_entries(x, k)[0]
