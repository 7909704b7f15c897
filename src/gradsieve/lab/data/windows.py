"""A long row of symbols as samples: windows one after the other, and for each symbol the one that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.errors import InputError


class TokenBatch(NamedTuple):
    """(row, time) symbols, and the symbol after each."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class WindowSet:
    """Windows of `length`; window i + 1 goes on where window i ends."""

    tokens: Tensor
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or len(self.tokens) <= self.length:
            raise InputError(f"a text of {len(self.tokens)} symbols has no window of {self.length}: use a shorter one")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> TokenBatch:
        """These windows; nothing about them is random."""
        windows = self.tokens[indices[:, None] * self.length + torch.arange(self.length + 1)].long()
        return TokenBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
