"""Samples for BERT's pre-training (Devlin et al., 2019): two segments with some pieces masked.

A sample is [CLS] A [SEP] B [SEP]. B follows A in the text or, in half of the samples, comes from elsewhere. The model
predicts 15 % of the pieces. Of these, 80 % are replaced by [MASK], 10 % by a random piece, and 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.dataset import Dataset
from gradsieve.lab.data.sampler import generator_of, mixed_seed
from gradsieve.lab.data.tokens import CLASSIFY, MASK, SEPARATE, SPECIAL

PREDICTED = 0.15  # share of pieces to be predicted
REPLACED, CHANGED = 0.8, 0.1  # shares of these that become [MASK] or a random piece
MIN_LENGTH = 8
SURROUND = 3  # [CLS] and two [SEP]


class MaskedBatch(NamedTuple):
    """Pieces as the model sees them, and what it has to predict."""

    tokens: Tensor  # (row, time)
    segments: Tensor  # (row, time), 0 for A and 1 for B
    masked: Tensor  # positions of the pieces to be predicted, in the flattened grid
    words: Tensor  # the original piece at each of these positions
    follows: Tensor  # per row: 0 if B follows A, 1 if not


@dataclass(frozen=True, eq=False)
class MaskedSet(Dataset[MaskedBatch]):
    """Windows of a sequence of pieces."""

    tokens: Tensor
    length: int
    vocabulary: int
    seed: int = 0  # for the masks of batches without a generator

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise InputError(f"a sequence must have at least {MIN_LENGTH} pieces, got {self.length}")
        if len(self) < 2:
            raise InputError(f"a text of {len(self.tokens)} pieces is less than two sequences of {self.length}")

    @override
    def __len__(self) -> int:
        return len(self.tokens) // (self.length - SURROUND)

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> MaskedBatch:
        """Windows with random masks. Without a generator, a window has the same mask every time."""
        if generator is not None:
            return self._drawn(indices, generator)
        rows = [self._drawn(index[None], generator_of(mixed_seed(self.seed, int(index)))) for index in indices]
        masked = [row.masked + number * self.length for number, row in enumerate(rows)]
        tokens, segments, _, words, follows = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return MaskedBatch(tokens, segments, torch.cat(masked), words, follows)

    def _drawn(self, indices: Tensor, generator: torch.Generator) -> MaskedBatch:
        pieces, follows = self._pairs(indices, generator)
        count, split = len(indices), self._split
        tokens = torch.full((count, self.length), SEPARATE)
        tokens[:, 0] = CLASSIFY
        tokens[:, 1 : 1 + split], tokens[:, 2 + split : -1] = pieces[:, :split], pieces[:, split:]
        segments = (torch.arange(self.length) >= 2 + split).long().expand(count, -1).contiguous()
        masked = self._masked(count, generator)
        words = tokens.flatten()[masked]
        tokens.view(-1)[masked] = self._replacements(words, generator)
        return MaskedBatch(tokens, segments, masked, words, follows)

    @property
    def _split(self) -> int:
        """Number of pieces of A."""
        return (self.length - SURROUND) // 2

    def _pairs(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width = self.length - SURROUND
        unrelated = torch.rand(len(indices), generator=generator) < 0.5
        elsewhere = torch.randint(1, len(self), (len(indices),), generator=generator)
        second = torch.where(unrelated, (indices + elsewhere) % len(self), indices)
        windows = torch.arange(width)
        first_of, second_of = (self.tokens[start[:, None] * width + windows].long() for start in (indices, second))
        return torch.cat([first_of[:, : self._split], second_of[:, self._split :]], 1), unrelated.long()

    def _masked(self, count: int, generator: torch.Generator) -> Tensor:
        """Random positions, equally many in each row, so that all batches cost the same."""
        ordinary = torch.arange(self.length)
        ordinary = ordinary[(ordinary != 0) & (ordinary != 1 + self._split) & (ordinary != self.length - 1)]
        predicted = max(1, round(PREDICTED * len(ordinary)))
        chosen = torch.rand(count, len(ordinary), generator=generator).argsort(1)[:, :predicted].sort(1).values
        return (ordinary[chosen] + torch.arange(count)[:, None] * self.length).flatten()

    def _replacements(self, words: Tensor, generator: torch.Generator) -> Tensor:
        draw = torch.rand(len(words), generator=generator)
        others = torch.randint(len(SPECIAL), self.vocabulary, (len(words),), generator=generator)
        changed = torch.where(draw < REPLACED + CHANGED, others, words)
        return torch.where(draw < REPLACED, torch.full_like(words, MASK), changed)
