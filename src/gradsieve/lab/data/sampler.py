"""Samplers: which rank sees which sample in which step, decided by a seed, for any number of ranks, resumable anywhere.

In an epoch each sample is seen once, by exactly one rank. Every rank takes the same number of steps, and each step has
a sample for every rank: if the samples of the last step are too few, it is merged into the previous one. In the last
step the batches of ranks may differ by one sample. In all other steps they have the requested size.

Positions count samples, not steps, so a run that was saved on 4 ranks can continue on 3 or 8. If fewer samples are left
then than there are ranks, they are skipped and the next epoch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError


class Draw(NamedTuple):
    """One rank's samples of one step."""

    indices: Tensor
    epoch: int
    seed: int  # for random parts of this batch, such as crops; the same after a resume
    fresh: bool  # the samples do not continue those of the previous step: carry no state over


class Sampler(Protocol):
    """Iterating yields the rest of the current epoch. The state is that after the last draw."""

    @property
    def progress(self) -> float:
        """Epochs done, with the fraction of the current one."""
        ...

    @property
    def steps_left(self) -> int:
        """Steps in the rest of the current epoch."""
        ...

    def __iter__(self) -> Iterator[Draw]: ...

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, also on another number of ranks or with another batch size."""
        ...


@dataclass(frozen=True)
class Share:
    """This rank's share of the samples."""

    num_samples: int
    batch: int  # samples per rank and step
    rank: int = 0
    size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"batch must be at least 1, got {self.batch}")
        if not 0 <= self.rank < self.size:
            raise InputError(f"rank must be in 0 to {self.size - 1}, got {self.rank}")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")
        if self.num_samples < self.size:
            raise InputError(
                f"there are more ranks than samples, {self.size} and {self.num_samples}: "
                f"use at most {self.num_samples} ranks, or more data"
            )

    def take(self, left: int) -> int:
        """Samples that the next step of all ranks uses, if `left` remain."""
        whole = self.batch * self.size
        return left if left < whole + self.size else whole

    def steps(self, left: int) -> int:
        """Steps in `left` samples."""
        whole = self.batch * self.size
        full, rest = divmod(left, whole)
        return max(full + (rest >= self.size), 1) if left >= self.size else 0

    def cut(self, count: int) -> slice:
        """This rank's part of `count` samples."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def draw_seed(self, epoch: int, position: int) -> int:
        """A seed that differs between ranks, steps and epochs."""
        return mixed_seed(self.seed, epoch, position, self.rank)


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers. Different numbers give independent seeds."""
    word = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return int(word) & (2**63 - 1)


def generator_of(seed: int) -> torch.Generator:
    """A new generator, independent of all other draws."""
    return torch.Generator().manual_seed(seed)


class ShuffledSampler(Sampler):
    """A new random order in every epoch."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.epoch = 0
        self.position = 0

    @property
    @override
    def progress(self) -> float:
        return self.epoch + self.position / self.share.num_samples

    @property
    @override
    def steps_left(self) -> int:
        return self.share.steps(self.share.num_samples - self.position)

    @override
    def __iter__(self) -> Iterator[Draw]:
        epoch, start, total = self.epoch, self.position, self.share.num_samples
        order = torch.randperm(total, generator=generator_of(mixed_seed(self.share.seed, epoch)))
        while start < total:
            count = self.share.take(total - start)
            mine = order[start : start + count][self.share.cut(count)]
            draw = Draw(mine, epoch, self.share.draw_seed(epoch, start), fresh=True)
            start += count
            self.epoch, self.position = (epoch, start) if start < total else (epoch + 1, 0)
            yield draw

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.share.num_samples}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same_samples(state, self.share)
        self.epoch, self.position = state["epoch"], state["position"]
        if self.share.num_samples - self.position < self.share.size:
            self.epoch, self.position = self.epoch + 1, 0


def require_same_samples(state: dict[str, Any], share: Share) -> None:
    """Raise an error if the state is of other data: its position would be meaningless."""
    if state["num_samples"] != share.num_samples:
        raise InputError(
            f"the saved run had {state['num_samples']} samples, this one has {share.num_samples}: "
            f"resume with the same data"
        )


def evaluation_batches(num_samples: int, batch: int, rank: int = 0, size: int = 1) -> Iterator[Tensor]:
    """This rank's share of all samples, in order, as batches. It may be empty."""
    stop = num_samples * (rank + 1) // size
    for start in range(num_samples * rank // size, stop, batch):
        yield torch.arange(start, min(start + batch, stop))
