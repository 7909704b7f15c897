"""The interface between tasks and trainers: any trainer can train any task.

task = WORKLOADS["resnet20"].open("default")
model, sampler = task.model(seed), task.sampler(rank, size, seed)
for batch in task.batches(sampler):               # the rest of the current epoch
    loss, carry = task.loss(model, batch, carry)  # carry: the state of a recurrent model, None at first
sums = task.measure(model, rank, size)            # a few numbers; add them over ranks, then:
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
    """The loss of one batch."""

    loss: Tensor
    carry: Any = None  # state for the next batch; plain tensors, detached


class Drawn(NamedTuple, Generic[B]):
    """A batch from the sampler."""

    data: B
    fresh: bool  # it does not continue the previous batch: carry no state over
    epoch: int


@dataclass(frozen=True)
class Metric:
    """The name of a score, its direction and its format."""

    name: str
    higher_is_better: bool
    form: str = "{:.3f}"


@dataclass(frozen=True, eq=False)
class Task(ABC, Generic[B]):
    """Data, model and loss, ready to be trained."""

    train: Dataset[B]
    test: Dataset[B]
    architecture: Architecture[Any]
    shape: Any
    batch: int  # samples per rank and step
    test_batch: int = 256  # larger is faster, and takes more memory

    metrics: ClassVar[tuple[Metric, ...]]  # runs are compared by the first one
    num_sums: ClassVar[int]  # length of the tensor that `tally` returns

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            raise InputError(
                f"both parts need at least 1 sample, got {len(self.train)} to train on and {len(self.test)} to test on"
            )

    def model(self, seed: int = 0) -> nn.Module:
        """A new model; the seed decides its initial weights."""
        return self.architecture.build(self.shape, seed)

    def num_parameters(self) -> int:
        """Number of trained parameters, without allocating them."""
        with torch.device("meta"):
            return count_parameters(self.architecture.make(self.shape))

    def sampler(self, rank: int = 0, size: int = 1, seed: int = 0) -> Sampler:
        """A sampler of this rank's share of every epoch."""
        return ShuffledSampler(Share(len(self.train), self.batch, rank, size, seed))

    def batches(self, sampler: Sampler, device: torch.device | str = "cpu") -> Iterator[Drawn[B]]:
        """The batches of the rest of the current epoch."""
        for draw in sampler:
            data = self.train.batch(draw.indices, generator_of(draw.seed))
            yield Drawn(moved(data, device), draw.fresh, draw.epoch)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Drawn[B], carry: Any = None) -> Outcome:
        """The mean loss over the batch, to be differentiated, and the state for the next batch."""

    @abstractmethod
    def tally(self, model: nn.Module, data: B) -> Tensor:
        """What `scores` needs from this batch: float64 numbers that can be added over batches and ranks."""

    @abstractmethod
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """The metrics, from the sum of all tallies."""

    def measure(self, model: nn.Module, rank: int = 0, size: int = 1, limit: int | None = None) -> Tensor:
        """The sum of all tallies over this rank's share of the test data, or of its first `limit` samples.

        Pass the bare model, not one wrapped in DDP: nothing is communicated here.
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

    def evaluate(self, model: nn.Module, limit: int | None = None) -> Mapping[str, float]:
        """The metrics, computed in one process."""
        return self.scores(self.measure(model, limit=limit))


def moved(data: B, device: torch.device | str) -> B:
    """The batch on another device."""
    kind: Any = type(data)
    return kind(*(part.to(device) for part in data))  # type: ignore[no-any-return]
