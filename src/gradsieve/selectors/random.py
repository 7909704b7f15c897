"""Random-k: the baseline that shows why magnitudes matter.

One entry from each of k equal stretches, at a place drawn anew every step; the same places on every rank, so that the
sum of all ranks has k entries too. Every entry has the same chance in the long run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries, index_dtype, kernels
from gradsieve.selectors.protocol import Selector
from gradsieve.vector import SparseVector


class RandomState(NamedTuple):
    """Steps done so far: with the seed it fixes what is drawn."""

    step: int = 0


@dataclass(frozen=True)
class Random(Selector[RandomState]):
    """Picks k entries by lot."""

    seed: int = 0  # must be the same on all ranks, or their picks do not meet

    @override
    def init(self, numel: int) -> RandomState:
        return RandomState()

    @override
    def floor(self, state: RandomState) -> float | None:
        return None

    @override
    def select(
        self, accumulated: Tensor, k: int, state: RandomState, candidates: Entries | None
    ) -> tuple[SparseVector, RandomState]:
        entries = self._broken(accumulated) or self._drawn(accumulated, k, state.step)
        return SparseVector.trusted(entries, accumulated.numel()), RandomState(state.step + 1)

    def _drawn(self, x: Tensor, k: int, step: int) -> Entries:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        edges = torch.arange(k + 1) * x.numel() // k
        offsets = (torch.rand(k, generator=generator, dtype=torch.float64) * edges.diff()).long()
        indices = (edges[:-1] + offsets).to(index_dtype(x.numel())).to(x.device)
        values = x[indices]
        kept = values != 0
        return indices[kept], values[kept]

    def _broken(self, x: Tensor) -> Entries | None:
        """What is not finite, if anything: chance must not hide it from the other ranks."""
        if bool(torch.isfinite(x.sum())):
            return None
        entries = kernels(x).compact(x, torch.inf, 1)
        return entries if entries[0].numel() else None
