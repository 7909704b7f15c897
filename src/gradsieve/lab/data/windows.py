"""Consecutive windows of a long sequence of symbols, with the next symbol as the target of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.dataset import Dataset


class TokenBatch(NamedTuple):
    """Symbols, (row, time), and the symbol after each."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class WindowSet(Dataset[TokenBatch]):
    """Windows of `length` symbols. Window i + 1 starts where window i ends."""

    tokens: Tensor
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or len(self.tokens) <= self.length:
            raise InputError(
                f"a text of {len(self.tokens)} symbols has no window of {self.length}: use a shorter window"
            )

    @override
    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> TokenBatch:
        windows = self.tokens[indices[:, None] * self.length + torch.arange(self.length + 1)].long()
        return TokenBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
