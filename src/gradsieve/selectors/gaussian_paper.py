"""Gaussian-k as published, for comparison: the count can be far from k for heavy-tailed gradients.

1. The threshold is mean + z * deviation, z the normal quantile of 1 - density / 2.
2. Up to three times: halve it if fewer than 2k/3 are above, raise it by half if more than 4k/3 are.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class GaussianPaper(Stateless):
    """Gaussian-k with the published correction."""

    corrections: int = 3  # how often the threshold may be halved or raised by half; more comes closer to k

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        fast = kernels(accumulated)
        numel = accumulated.numel()
        mean, deviation = fast.moments(accumulated)
        quantile = min(1 - k / numel / 2, 1 - 1e-16)
        threshold = max(0.0, mean + NormalDist().inv_cdf(quantile) * deviation)
        if threshold != threshold:  # the input is not finite: select the entries that are not
            threshold = float("inf")
        entries = fast.compact(accumulated, threshold, k)
        for _ in range(self.corrections):
            count = entries[0].numel()
            if 2 * k / 3 <= count <= 4 * k / 3:
                break
            threshold *= 0.5 if count < 2 * k / 3 else 1.5
            entries = fast.compact(accumulated, threshold, k)
        return SparseVector.trusted(entries, numel), state
