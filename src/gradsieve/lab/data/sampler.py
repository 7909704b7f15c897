"""Who sees which sample when: shares of every epoch for any number of ranks, decided by a seed, resumable anywhere.

In an epoch each sample is seen once by exactly one rank. Every rank takes the same number of steps, and no rank is ever
without a sample: a last step that would leave a rank empty is merged into the one before it. Batches of other steps
have the size asked for; in the last, ranks may differ by one sample.

A position counts samples, not steps, so a run saved on 4 ranks goes on with 3 or 8. If then fewer samples are left than
there are ranks, they are passed over and the next epoch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import InputError


class Draw(NamedTuple):
    """One rank's samples of one step."""

    indices: Tensor
    epoch: int
    seed: int  # for what is random about this batch, such as cropping: the same again after a resume
    fresh: bool  # the samples do not continue those of the step before: carry nothing over


class Sampler(Protocol):
    """Iterating gives the rest of the current epoch; the state is that of after the last draw."""

    @property
    def progress(self) -> float:
        """Epochs done, with the part of the current one."""

    @property
    def steps_left(self) -> int:
        """Steps in the rest of the current epoch."""

    def __iter__(self) -> Iterator[Draw]: ...

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also on another number of ranks or with another batch size."""


@dataclass(frozen=True)
class Share:
    """Which part of the work this rank has."""

    num_samples: int
    batch: int  # samples a rank and step
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
                f"there are more workers than samples, {self.size} and {self.num_samples}: "
                f"use at most {self.num_samples} workers, or more data"
            )

    def take(self, left: int) -> int:
        """How many samples the next step of all ranks uses, of so many left."""
        whole = self.batch * self.size
        return left if left < whole + self.size else whole

    def steps(self, left: int) -> int:
        """How many steps so many samples are."""
        whole = self.batch * self.size
        full, rest = divmod(left, whole)
        return max(full + (rest >= self.size), 1) if left >= self.size else 0

    def cut(self, count: int) -> slice:
        """This rank's part of `count` samples."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def draw_seed(self, epoch: int, position: int) -> int:
        """Differs between ranks, steps and epochs."""
        return mixed_seed(self.seed, epoch, position, self.rank)


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers; different ones give unrelated seeds."""
    word = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return int(word) & (2**63 - 1)


def generator_of(seed: int) -> torch.Generator:
    """A generator of its own, so that nobody else's draws matter."""
    return torch.Generator().manual_seed(seed)


class ShuffledSampler:
    """Another random order every epoch."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.epoch = 0
        self.position = 0

    @property
    def progress(self) -> float:
        """Epochs done, with the part of the current one."""
        return self.epoch + self.position / self.share.num_samples

    @property
    def steps_left(self) -> int:
        """Steps in the rest of the current epoch."""
        return self.share.steps(self.share.num_samples - self.position)

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

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.share.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also on another number of ranks or with another batch size."""
        require_same_samples(state, self.share)
        self.epoch, self.position = state["epoch"], state["position"]
        if self.share.num_samples - self.position < self.share.size:
            self.epoch, self.position = self.epoch + 1, 0


def require_same_samples(state: dict[str, Any], share: Share) -> None:
    """A position in other data means nothing."""
    if state["num_samples"] != share.num_samples:
        raise InputError(
            f"the saved run had {state['num_samples']} samples, this one has {share.num_samples}: "
            f"resume with the same data"
        )


def evaluation_batches(num_samples: int, batch: int, rank: int = 0, size: int = 1) -> Iterator[Tensor]:
    """This rank's part of all samples in order; it may be empty."""
    stop = num_samples * (rank + 1) // size
    for start in range(num_samples * rank // size, stop, batch):
        yield torch.arange(start, min(start + batch, stop))
