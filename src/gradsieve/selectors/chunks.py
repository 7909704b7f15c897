"""Top-k within chunks: each chunk of consecutive entries sends its own largest entries, as in SparseLoCo
(Sarfi et al., 2025, https://arxiv.org/abs/2508.15706).

So every part of the model has its share in every exchange, even if its magnitudes are smaller than those of others.

1. Cut the vector into chunks of 4,096 entries. The last one may be shorter. If that gives more than k chunks, take
   chunks of ceil(numel / k) entries instead.
2. The first i chunks of length L send floor(i L k / numel) entries together, and all chunks send k. So each chunk sends
   its share, rounded up or down, and at least one entry: no chunk waits for ever, and no NaN stays unseen.
3. Each chunk selects its share by magnitude, and the lower index among equals. Zeros are never selected: a chunk with
   fewer other entries than its share sends fewer.
Counts depend on numel and k alone, except for zeros.

Cost: one pass over memory, without any state.

Where this differs from the paper: k follows from a density, so the counts of chunks may differ by one. Chunks are
ranges of the flat group, so one chunk may hold the end of a matrix and the start of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class Chunks(Stateless):
    """Selects the largest magnitudes of each chunk of consecutive entries."""

    chunk: int = 4096  # entries; more comes closer to top-k of the whole vector, less spreads selections more evenly

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"chunk must be at least 1, got {self.chunk}")

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        numel = accumulated.numel()
        length, edges = cut(numel, k, self.chunk)
        return SparseVector.trusted(kernels(accumulated).top_of_chunks(accumulated, length, edges), numel), state


def cut(numel: int, k: int, chunk: int) -> tuple[int, Tensor]:
    """Return the length of chunks, and the number of entries that the first i chunks send, for every i."""
    length = min(max(chunk, -(-numel // k)), numel)  # 1
    numbers = torch.arange(-(-numel // length) + 1)
    whole, rest = divmod(length * k, numel)
    edges = numbers * whole + numbers * rest // numel  # 2, in parts that int64 holds
    edges[-1] = k
    return length, edges
