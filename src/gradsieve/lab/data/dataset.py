"""The interface of datasets: the number of samples, and batches of samples by index."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

B_co = TypeVar("B_co", covariant=True)


class Dataset(Protocol[B_co]):
    """Samples by index. All randomness of a batch comes from the generator; without one, nothing is random."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> B_co:
        """The samples of these indices, ready for the model."""
        ...
