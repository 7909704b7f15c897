"""Random-k: the baseline that shows why magnitudes matter.

Each step selects one random index from each of k equal ranges. The indices are the same on all ranks, so that the sum
of all ranks has k entries as well. In the long run all entries are selected equally often.
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
    """The number of steps so far, which determines the indices together with the seed."""

    step: int = 0


@dataclass(frozen=True)
class Random(Selector[RandomState]):
    """Selects k random entries."""

    seed: int = 0  # must be the same on all ranks, or they select different indices

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
        """Return the entries that are not finite, if any: other ranks must always see them."""
        if bool(torch.isfinite(x.sum())):
            return None
        entries = kernels(x).compact(x, torch.inf, 1)
        return entries if entries[0].numel() else None
