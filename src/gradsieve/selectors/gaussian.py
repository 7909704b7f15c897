"""Gaussian-k (Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019,
https://arxiv.org/abs/1911.08772), corrected.

Gradients are bell-shaped, so mean and standard deviation give an estimate of the k-th magnitude. Real gradients have
heavier tails, so the estimate is corrected.
1. The threshold is the t for which a normal variable of that mean and deviation has |x| > t with probability k/n.
2. It is moved, by bisection on a sample, until about k entries are expected above it.
3. Entries above it are selected. If the count is above `band`, they are cut to k. If it is below, the threshold is
   lowered according to the count and the pass is repeated. After a few passes the exact k-th magnitude is used.

Cost: a pass for the moments and one for the selection, and more while the count is below `band`.

Where this differs from the paper: steps 2 and 3. The published correction, three times x0.5 or x1.5, misses k by a
factor of up to 24 on heavy tails (see `gaussian_paper`).
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

BISECTIONS = 12  # of a range of 64 to 1: leaves a thousandth of the threshold


def normal_threshold(mean: float, deviation: float, fraction: float) -> float:
    """Return the t for which |x| > t has the given probability, for normal x with any mean."""
    if not math.isfinite(mean) or not math.isfinite(deviation):
        return math.inf  # selects the entries that are not finite, and only those
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
    """Selects the entries above a threshold from mean and standard deviation."""

    band: tuple[float, float] = (0.85, 1.2)  # counts, in k, that need no correction; narrower costs more passes
    sample_entries: int = 1 << 17  # entries of the sample; more meets the band more often, and costs more
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
        return SparseVector.trusted(self._above(accumulated, k, threshold), accumulated.numel()), state

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

    def _above(self, x: Tensor, k: int, threshold: float) -> Entries:
        fast = kernels(x)
        for _ in range(self.max_passes):
            entries = fast.compact(x, threshold, k)
            count = entries[0].numel()
            if count > self.band[1] * k:
                return fast.cut(*entries, k)[0]
            if count >= self.band[0] * k or not math.isfinite(threshold) or threshold < torch.finfo(x.dtype).tiny:
                return entries
            # Tails fall at least as fast as t^-3 here: this lowers it enough, and surplus entries are cut.
            threshold *= max(0.25, (max(count, 1) / (1.1 * k)) ** (1 / 3))
        return top_entries(x, k)[0]
