"""Synthetic gradients: layers of very different scale, heavy tails, a part that all ranks share, new in every step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

LAYERS = 24
SCALE_DECADES = 1.5  # between the layers of smallest and largest scale, as in a VGG
MAX_SHIFT = 1 << 16
ALIGNED_ENTRIES = 16  # a cache line of float32: shifted gradients stay as aligned as real ones


class Gradients:
    """An endless supply of float32 gradients for one rank.

    One slightly longer tensor is drawn at the start, and every gradient is a view of it at another offset. So each
    entry gets a new value at the scale of its layer, a gradient costs no time, and many ranks fit in the memory of one
    machine. The shared part is equal on all ranks after equally many calls.
    """

    def __init__(self, numel: int, *, rank: int = 0, seed: int = 0) -> None:
        self.numel = numel
        # With few entries, offsets at cache lines only would be too few: gradients would repeat.
        self._stride = ALIGNED_ENTRIES if numel >= MAX_SHIFT else 1
        self._shifts = min(MAX_SHIFT, numel) // self._stride
        self._drawn = _draw(numel + self._shifts * self._stride, rank, seed)
        self._generator = torch.Generator().manual_seed(seed)

    def fresh(self) -> Tensor:
        """The next gradient, a view that must not be written to."""
        shift = int(torch.randint(self._shifts, (), generator=self._generator)) * self._stride
        return self._drawn[shift : shift + self.numel]


def _draw(length: int, rank: int, seed: int) -> Tensor:
    shared = layered(length, torch.Generator().manual_seed(seed))
    own = layered(length, torch.Generator().manual_seed(seed * 1_009 + rank + 1))
    return shared.add_(own)


def layered(length: int, generator: torch.Generator) -> Tensor:
    """Blocks of normal and Laplace distributed numbers in turn. Sizes and scales of the blocks are always the same."""
    layers = torch.Generator().manual_seed(1)
    sizes = torch.randn(LAYERS, generator=layers, dtype=torch.float64).mul_(1.5).exp_()
    edges = [0, *(sizes.cumsum(0) / sizes.sum() * length).long().tolist()]
    scales = (10 ** (-SCALE_DECADES * torch.rand(LAYERS, generator=layers))).tolist()
    drawn = torch.empty(length)
    for number, (start, stop) in enumerate(pairwise(edges)):
        block = drawn[start : length if number == LAYERS - 1 else stop]
        if number % 2:
            block.exponential_(generator=generator)
            block.sub_(torch.empty_like(block).exponential_(generator=generator))
        else:
            block.normal_(generator=generator)
        block.mul_(scales[number])
    return drawn
