"""Samples for BERT's pre-training (Devlin et al., 2019): two segments, some pieces hidden.

A sample is [CLS] A [SEP] B [SEP]. B follows A in the text, or every other time comes from elsewhere. Of the pieces of A
and B 15 % are to be told; of these 80 % are replaced by [MASK], 10 % by any piece, and 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.lab.data.sampler import generator_of, mixed_seed
from gradsieve.lab.data.tokens import CLASSIFY, MASK, SEPARATE, SPECIAL

TOLD = 0.15  # share of pieces to be told
HIDDEN, CHANGED = 0.8, 0.1  # of these
MIN_LENGTH = 8
SURROUND = 3  # [CLS] and two [SEP]


class MaskedBatch(NamedTuple):
    """Pieces as the model sees them, and what it is asked."""

    tokens: Tensor  # (row, time)
    segments: Tensor  # (row, time), 0 for A and 1 for B
    places: Tensor  # of pieces to be told, in the flattened grid
    words: Tensor  # the piece at each of these places
    follows: Tensor  # a row: 0 if B follows A, 1 if not


@dataclass(frozen=True, eq=False)
class MaskedSet:
    """Windows of a row of pieces; a test set hides the same pieces every time."""

    tokens: Tensor
    length: int
    vocabulary: int
    seed: int = 0  # of what is hidden where no generator is given

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise InputError(f"a sequence must have at least {MIN_LENGTH} pieces, got {self.length}")
        if len(self) < 2:
            raise InputError(f"a text of {len(self.tokens)} pieces is less than two sequences of {self.length}")

    def __len__(self) -> int:
        return len(self.tokens) // (self.length - SURROUND)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> MaskedBatch:
        """These windows, hidden by lot; without a generator a window has the same lot each time."""
        if generator is not None:
            return self._drawn(indices, generator)
        rows = [self._drawn(index[None], generator_of(mixed_seed(self.seed, int(index)))) for index in indices]
        places = [row.places + number * self.length for number, row in enumerate(rows)]
        tokens, segments, _, words, follows = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return MaskedBatch(tokens, segments, torch.cat(places), words, follows)

    def _drawn(self, indices: Tensor, generator: torch.Generator) -> MaskedBatch:
        pieces, follows = self._pairs(indices, generator)
        count, split = len(indices), self._split
        tokens = torch.full((count, self.length), SEPARATE)
        tokens[:, 0] = CLASSIFY
        tokens[:, 1 : 1 + split], tokens[:, 2 + split : -1] = pieces[:, :split], pieces[:, split:]
        segments = (torch.arange(self.length) >= 2 + split).long().expand(count, -1).contiguous()
        places = self._places(count, generator)
        words = tokens.flatten()[places]
        tokens.view(-1)[places] = self._hidden(words, generator)
        return MaskedBatch(tokens, segments, places, words, follows)

    @property
    def _split(self) -> int:
        """Pieces of A."""
        return (self.length - SURROUND) // 2

    def _pairs(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width = self.length - SURROUND
        strange = torch.rand(len(indices), generator=generator) < 0.5
        elsewhere = torch.randint(1, len(self), (len(indices),), generator=generator)
        second = torch.where(strange, (indices + elsewhere) % len(self), indices)
        windows = torch.arange(width)
        first_of, second_of = (self.tokens[start[:, None] * width + windows].long() for start in (indices, second))
        return torch.cat([first_of[:, : self._split], second_of[:, self._split :]], 1), strange.long()

    def _places(self, count: int, generator: torch.Generator) -> Tensor:
        """The same number in each row, so that a batch costs the same wherever it is."""
        ordinary = torch.arange(self.length)
        ordinary = ordinary[(ordinary != 0) & (ordinary != 1 + self._split) & (ordinary != self.length - 1)]
        told = max(1, round(TOLD * len(ordinary)))
        lots = torch.rand(count, len(ordinary), generator=generator).argsort(1)[:, :told].sort(1).values
        return (ordinary[lots] + torch.arange(count)[:, None] * self.length).flatten()

    def _hidden(self, words: Tensor, generator: torch.Generator) -> Tensor:
        lot = torch.rand(len(words), generator=generator)
        others = torch.randint(len(SPECIAL), self.vocabulary, (len(words),), generator=generator)
        changed = torch.where(lot < HIDDEN + CHANGED, others, words)
        return torch.where(lot < HIDDEN, torch.full_like(words, MASK), changed)
