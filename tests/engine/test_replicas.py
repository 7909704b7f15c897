"""Fingerprints of parameters, and the verdict on ranks that differ. Ranks as threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import ReplicaError
from gradsieve.comm import Comm
from gradsieve.engine.replicas import CHUNK_WORDS, compare_replicas, fingerprints
from gradsieve.testing import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def values(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_place_counts(dtype: torch.dtype) -> None:
    numel = CHUNK_WORDS + 5
    parameter = values(numel, dtype)
    before = fingerprints([parameter])
    assert torch.equal(before, fingerprints([parameter.clone()]))
    seen = {int(before)}
    for place in (0, 1, CHUNK_WORDS - 1, CHUNK_WORDS, numel - 1):
        for bit in range(8 * dtype.itemsize):
            changed = parameter.clone()
            changed.view(torch.uint8).view(numel, dtype.itemsize)[place, bit // 8] ^= 1 << (bit % 8)
            seen.add(int(fingerprints([changed])))
    assert len(seen) == 1 + 5 * 8 * dtype.itemsize


def test_entries_that_change_places_and_signs_that_flip_together_show() -> None:
    parameter = values(1000, torch.float32)
    swapped, flipped = parameter.clone(), parameter.clone()
    swapped[[3, 700]] = parameter[[700, 3]]
    flipped[[3, 700]] *= -1
    assert len({int(fingerprints([each])) for each in (parameter, swapped, flipped)}) == 3


def test_the_order_is_that_of_the_shape_not_of_memory() -> None:
    parameter = values(4 * 3 * 5 * 6, torch.float32).view(4, 3, 5, 6)
    same = parameter.clone(memory_format=torch.channels_last)
    assert torch.equal(fingerprints([parameter]), fingerprints([same]))


def verdict(size: int, odd: dict[int, str], joined: tuple[int, ...] = ()) -> list[str]:
    """What each rank is told when these ranks have these parameters changed, each rank in its own way."""

    def work(comm: Comm) -> str:
        parameters = {name: values(100, torch.float32) for name in ("one", "two", "three")}
        for name in odd.get(comm.rank, "").split():
            parameters[name][comm.rank] += 1
        try:
            compare_replicas(parameters, comm, joined=comm.rank in joined)
        except ReplicaError as error:
            return f"{error.ranks} {error.parameter}: {error}"
        return "fine"

    return run_ranks(size, work)


def test_all_ranks_are_told_who_differs_and_where_first() -> None:
    for rank, told in enumerate(verdict(4, {1: "three two"})):
        assert told.startswith(
            f"(1,) two: rank {rank}: replicas have drifted apart: rank 1 differs from ranks 0, 2, 3; "
        )
        assert "parameter two is the first of 2 that are not the same (of 3)" in told


def test_several_that_differ_are_all_named() -> None:
    for told in verdict(5, {0: "three", 3: "one"}):
        assert told.startswith("(0, 3) one: ")
        assert "ranks 0, 3 differ from ranks 1, 2, 4;" in told


def test_without_a_majority_all_are_named() -> None:
    for told in verdict(2, {1: "two"}):
        assert "ranks 0, 1 differ from each other, and no state has a majority; parameter two" in told


def test_equal_replicas_are_fine_and_joined_ranks_do_not_count() -> None:
    assert verdict(3, {}) == ["fine"] * 3
    assert verdict(3, {2: "one"}, joined=(2,)) == ["fine"] * 3
    assert verdict(2, {}, joined=(0, 1)) == ["fine"] * 2
