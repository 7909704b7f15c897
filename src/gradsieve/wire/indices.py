"""Sorted indices as bytes: plain words, or gaps in as few bits as suit them, whichever is smaller.

Gaps need the compiled kernels, so indices that live elsewhere than in main memory travel plain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsieve.kernels import gaps, index_dtype, kernels
from gradsieve.kernels.gaps import GapPlan

PLAIN, GAPS = 0, 1
NO_GAPS = GapPlan(0, 0, 0)
ALIGNED_BYTES = 8  # so that values of any width can follow


@dataclass(frozen=True)
class IndexCode:
    """How the indices of one message are written; one 64-bit word says it all to the receiver."""

    kind: int
    count: int
    itemsize: int  # of a plain index
    gaps: GapPlan = NO_GAPS

    @classmethod
    def smallest(cls, indices: Tensor, low: int) -> IndexCode:
        """The code that takes the fewest bytes for these indices, none of which is below `low`."""
        plain = cls(PLAIN, indices.numel(), indices.element_size())
        if indices.numel() == 0 or indices.device.type != "cpu":
            return plain
        packed = cls(GAPS, indices.numel(), indices.element_size(), gaps.plan(indices.numpy(), low))
        return packed if packed.num_bytes < plain.num_bytes else plain

    @classmethod
    def from_word(cls, word: int, count: int, numel: int) -> IndexCode | None:
        """What a received word says; None if it makes no sense."""
        kind, width, wide, num_wide = word & 0xFF, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 24
        code = cls(kind, count, index_dtype(numel).itemsize, GapPlan(width, wide, num_wide))
        if kind == PLAIN:
            return code
        sane = kind == GAPS and 1 <= width <= wide <= gaps.MAX_BITS and 0 <= num_wide <= count
        return code if sane else None

    @property
    def word(self) -> int:
        """For the header."""
        return self.kind | self.gaps.width << 8 | self.gaps.wide << 16 | self.gaps.num_wide << 24

    @property
    def num_bytes(self) -> int:
        """What the indices take, rounded up to whole words."""
        if self.kind == GAPS:
            return 8 * self.gaps.num_words(self.count)
        plain = self.count * self.itemsize
        return plain + -plain % ALIGNED_BYTES

    def write(self, indices: Tensor, low: int) -> Tensor:
        """The bytes."""
        if self.kind == GAPS:
            words = np.empty(self.gaps.num_words(self.count) + 1, np.uint64)
            gaps.encode(indices.numpy(), low, self.gaps.width, self.gaps.wide, words)
            return torch.from_numpy(words[:-1]).view(torch.uint8)
        padded = indices.new_zeros(self.num_bytes // self.itemsize)
        padded[: self.count] = indices
        return padded.view(torch.uint8)

    def read(self, data: Tensor, numel: int, low: int, high: int) -> Tensor | str:
        """The indices, strictly increasing in `[low, high)`, or what is wrong with the bytes."""
        if self.kind == GAPS:
            return self._read_gaps(data, numel, low, high)
        indices = data.view(index_dtype(numel))[: self.count]
        position = kernels(data.new_empty(0, dtype=torch.float32)).first_disorder(indices, low, high)
        if position < 0:
            return indices
        return (
            f"index {int(indices[position])} at position {position}, "
            f"indices must be strictly increasing in [{low}, {high})"
        )

    def _read_gaps(self, data: Tensor, numel: int, low: int, high: int) -> Tensor | str:
        words = np.zeros(data.numel() // 8 + 1, np.uint64)
        words[:-1] = data.cpu().numpy().view(np.uint64)
        indices = torch.empty(self.count, dtype=index_dtype(numel))
        if gaps.decode(words, low, high, *self.gaps, indices.numpy()):
            return indices.to(data.device)
        return f"gaps that do not stay within [{low}, {high})"
