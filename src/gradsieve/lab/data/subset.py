"""A part of a dataset: its first samples, or samples spread evenly over all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.dataset import Dataset

B = TypeVar("B", bound=tuple[Any, ...])


def first(dataset: Dataset[B], count: int | None) -> Dataset[B]:
    """The first `count` samples, or all if that is None or more than there are."""
    if count is None or count >= len(dataset):
        return dataset
    _require_positive(count)
    return Subset(dataset, count, span=count)


def spread(dataset: Dataset[B], count: int) -> Dataset[B]:
    """`count` samples at equal distances over the whole dataset, or all if that is more than there are."""
    _require_positive(count)
    return dataset if count >= len(dataset) else Subset(dataset, count, span=len(dataset))


@dataclass(frozen=True, eq=False)
class Subset(Dataset[B]):
    """`count` samples at equal distances over the first `span` samples of a dataset."""

    dataset: Dataset[B]
    count: int
    span: int

    @override
    def __len__(self) -> int:
        return self.count

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> B:
        return self.dataset.batch(indices * self.span // self.count, generator)


def _require_positive(count: int) -> None:
    if count < 1:
        raise InputError(f"at least 1 sample is needed, got {count}")
