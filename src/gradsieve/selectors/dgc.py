"""Sampled top-k, from Deep Gradient Compression (Lin et al., ICLR 2018, https://arxiv.org/abs/1712.01887).

1. The threshold is the magnitude that a fraction k / numel of a sample (1 % of the entries) reaches.
2. Entries that are not below it are selected.
3. One correction: if too few are selected, the threshold is lowered once, by as much as the count is short. If too many
   are, the k largest of them are kept.

Cost: one pass over memory, two if too few entries were selected first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class Dgc(Stateless):
    """Selects by the threshold of a sample."""

    sample_fraction: float = 0.01  # of all entries; more is closer to k, and slower
    min_sample_entries: int = 4096  # the least size of a sample, as far as the vector has so many
    tolerance: float = 1.25  # counts within this factor of k need no correction; more corrects less often

    def __post_init__(self) -> None:
        if not 0 < self.sample_fraction <= 1:
            raise InputError(f"sample_fraction must be in (0, 1], got {self.sample_fraction}")
        if self.tolerance < 1:
            raise InputError(f"tolerance must be at least 1, got {self.tolerance}")

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        numel = accumulated.numel()
        looked_at = kernels(accumulated).sample(
            accumulated, max(self.min_sample_entries, int(numel * self.sample_fraction))
        )
        entries = self._above(accumulated, looked_at, k, float(k))
        count = entries[0].numel()
        if count < k / self.tolerance:
            entries = self._above(accumulated, looked_at, k, k * min(4.0, self.tolerance * k / max(count, 1)))
            count = entries[0].numel()
        if count > k * self.tolerance:
            entries, _ = kernels(accumulated).cut(*entries, k)
        return SparseVector.trusted(entries, numel), state

    def _above(self, x: Tensor, looked_at: Tensor, k: int, wanted: float) -> Entries:
        """Return the entries not below the magnitude that about `wanted` entries of x reach, by the sample."""
        rank = max(1, round(wanted * looked_at.numel() / x.numel()))
        threshold = kernels(looked_at).kth_magnitude(looked_at, min(rank, looked_at.numel()))
        return kernels(x).compact(x, threshold, k)
