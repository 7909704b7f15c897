"""What a trainer needs to know of a task, so that one trainer serves all.

task = WORKLOADS["resnet20"].open("default")
model, sampler = task.model(seed), task.sampler(rank, size, seed)
for batch in task.batches(sampler):               # the rest of the current epoch
    loss, carry = task.loss(model, batch, carry)  # carry: None at first; what a recurrent model hands on
sums = task.measure(model, rank, size)            # a few numbers; add them up over ranks, then:
task.scores(sums)                                 # {"accuracy": ..., "loss": ...}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gradsieve.errors import InputError
from gradsieve.lab.data.dataset import Dataset
from gradsieve.lab.data.sampler import Sampler, Share, ShuffledSampler, evaluation_batches, generator_of
from gradsieve.lab.models import Architecture, count_parameters

B = TypeVar("B", bound=tuple[Any, ...])


class Outcome(NamedTuple):
    """Of one batch."""

    loss: Tensor
    carry: Any = None  # for the next batch; plain tensors, detached


class Drawn(NamedTuple, Generic[B]):
    """A batch, and whether it continues the one before."""

    data: B
    fresh: bool
    epoch: int


@dataclass(frozen=True)
class Metric:
    """How a score is called, read and written."""

    name: str
    higher_is_better: bool
    form: str = "{:.3f}"


@dataclass(frozen=True, eq=False)
class Task(ABC, Generic[B]):
    """Data, model and question, ready to be trained."""

    train: Dataset[B]
    test: Dataset[B]
    architecture: Architecture[Any]
    shape: Any
    batch: int  # samples a worker and step
    test_batch: int = 256  # more is faster and takes more memory

    metrics: ClassVar[tuple[Metric, ...]]  # the first is the one to compare by

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            raise InputError(f"{len(self.train)} samples to train on and {len(self.test)} to test on: both need some")

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh one, the same for the same seed."""
        return self.architecture.build(self.shape, seed)

    def num_parameters(self) -> int:
        """Without the memory of a model."""
        with torch.device("meta"):
            return count_parameters(self.architecture.make(self.shape))

    def sampler(self, rank: int = 0, size: int = 1, seed: int = 0) -> Sampler:
        """This rank's samples of every epoch."""
        return ShuffledSampler(Share(len(self.train), self.batch, rank, size, seed))

    def batches(self, sampler: Sampler, device: torch.device | str = "cpu") -> Iterator[Drawn[B]]:
        """The rest of the current epoch."""
        for draw in sampler:
            data = self.train.batch(draw.indices, generator_of(draw.seed))
            yield Drawn(moved(data, device), draw.fresh, draw.epoch)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Drawn[B], carry: Any = None) -> Outcome:
        """To be differentiated; the mean over the batch."""

    @abstractmethod
    def tally(self, model: nn.Module, data: B) -> Tensor:
        """What `scores` needs of this batch, as float64 numbers that may be added up over batches and ranks."""

    @abstractmethod
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """The metrics, from all that was tallied."""

    def measure(self, model: nn.Module, rank: int = 0, size: int = 1, limit: int | None = None) -> Tensor:
        """Sums over this rank's part of the test data, or of its first `limit` samples.

        Give the bare model, not one wrapped for data-parallel training: nothing is communicated here.
        """
        was_training = model.training
        model.eval()
        device = next(model.parameters()).device
        count = len(self.test) if limit is None else min(limit, len(self.test))
        sums = torch.zeros(self.num_sums, dtype=torch.float64)
        with torch.inference_mode():
            for indices in evaluation_batches(count, self.test_batch, rank, size):
                sums += self.tally(model, moved(self.test.batch(indices), device)).cpu()
        model.train(was_training)
        return sums

    num_sums: ClassVar[int]

    def evaluate(self, model: nn.Module, limit: int | None = None) -> Mapping[str, float]:
        """The metrics, in one process."""
        return self.scores(self.measure(model, limit=limit))


@dataclass(frozen=True, eq=False)
class First(Generic[B]):
    """The first samples of a dataset."""

    dataset: Dataset[B]
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> B:
        """These samples."""
        return self.dataset.batch(indices, generator)


@dataclass(frozen=True, eq=False)
class Spread(Generic[B]):
    """Samples at equal distances over a whole dataset."""

    dataset: Dataset[B]
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> B:
        """These samples."""
        return self.dataset.batch(indices * len(self.dataset) // self.count, generator)


def spread(dataset: Dataset[B], count: int) -> Dataset[B]:
    """At most so many samples, from everywhere in the dataset."""
    if count < 1:
        raise InputError(f"at least 1 sample is needed, got {count}")
    return dataset if count >= len(dataset) else Spread(dataset, count)


def first(dataset: Dataset[B], count: int | None) -> Dataset[B]:
    """At most so many samples; all, if none is said."""
    if count is None or count >= len(dataset):
        return dataset
    if count < 1:
        raise InputError(f"at least 1 sample is needed, got {count}")
    return First(dataset, count)


def moved(data: B, device: torch.device | str) -> B:
    """The same batch on another device."""
    kind: Any = type(data)
    return kind(*(part.to(device) for part in data))  # type: ignore[no-any-return]
