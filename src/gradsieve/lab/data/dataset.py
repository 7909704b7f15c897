"""What a task asks of data: how many samples, and a batch of these ones."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

B_co = TypeVar("B_co", covariant=True)


class Dataset(Protocol[B_co]):
    """Samples by number. What is random about a batch comes from the generator; without one nothing is random."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> B_co:
        """These samples, ready for the model."""
