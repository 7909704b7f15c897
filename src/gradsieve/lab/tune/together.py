"""All ranks decide alike: rank 0 decides, and errors of one rank are raised on all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from gradsieve.errors import GradsieveError, InputError

T = TypeVar("T")


class AgreedError(InputError):
    """An error that all ranks raise with the same sentence, so that one of them is enough to print it."""


def decided(decide: Callable[[], T]) -> T:
    """The value that `decide` returns on rank 0. It is called nowhere else."""
    shared: list[Any] = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, 0)
    found: T = shared[0]
    return found


def gathered(own: T) -> list[T]:
    """The values of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def agreed(work: Callable[[], T]) -> T:
    """Run `work` on all ranks. If it fails on any rank, all raise the error of the first one that failed."""
    result: T | None = None
    sentence = None
    try:
        result = work()
    except GradsieveError as error:
        sentence = str(error)
    failed = [(rank, said) for rank, said in enumerate(gathered(sentence)) if said is not None]
    if failed:
        rank, said = failed[0]
        raise AgreedError(said if len(failed) > 1 else f"rank {rank}: {said}")
    assert result is not None
    return result


def typical(own: Sequence[float]) -> float:
    """The median over repetitions of the mean over ranks."""
    return statistics.median(statistics.fmean(times) for times in zip(*gathered(list(own)), strict=True))
