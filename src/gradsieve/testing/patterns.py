"""Inputs that have broken reducers and selectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.vector import SparseVector

SIZES = range(1, 9)


class Case(NamedTuple):
    """The entries of all ranks, each rank's as a dense vector with at most k non-zeros."""

    locals: list[Tensor]
    k: int
    window: tuple[int, int] | None = None  # the range that all ranks send as a run

    @property
    def numel(self) -> int:
        return self.locals[0].numel()

    def local(self, rank: int) -> SparseVector:
        """Return the vector that a rank sends."""
        if self.window is None:
            return sparse(self.locals[rank])
        return SparseVector.run(self.locals[rank][slice(*self.window)].clone(), self.window[0], self.numel)


def sparse(dense: Tensor) -> SparseVector:
    """Return the non-zero entries of a dense vector."""
    indices = dense.nonzero().flatten()
    return SparseVector(indices, dense[indices], dense.numel())


def scattered(numel: int, indices: Tensor, generator: torch.Generator) -> Tensor:
    """Return random non-zero whole numbers at some indices. Their sums are exact."""
    dense = torch.zeros(numel, dtype=torch.float64)
    values = torch.randint(1, 9, indices.shape, generator=generator)
    signs = torch.randint(0, 2, indices.shape, generator=generator) * 2 - 1
    dense[indices] = (values * signs).double()
    return dense


def disjoint(size: int, generator: torch.Generator) -> Case:
    numel, k = 40 * size, 10
    order = torch.randperm(numel, generator=generator)
    return Case([scattered(numel, order[r * k : (r + 1) * k], generator) for r in range(size)], k)


def identical(size: int, generator: torch.Generator) -> Case:
    one = scattered(200, torch.randperm(200, generator=generator)[:20], generator)
    return Case([one.clone() for _ in range(size)], 20)


def overlapping(size: int, generator: torch.Generator) -> Case:
    return Case([scattered(60, torch.randperm(60, generator=generator)[:15], generator) for _ in range(size)], 15)


def one_rank_empty(size: int, generator: torch.Generator) -> Case:
    case = overlapping(size, generator)
    case.locals[size // 2].zero_()
    return case


def all_empty(size: int, generator: torch.Generator) -> Case:
    return Case([torch.zeros(50, dtype=torch.float64) for _ in range(size)], 5)


def one_region(size: int, generator: torch.Generator) -> Case:
    numel, k = 1000, 12
    return Case(
        [scattered(numel, 970 + torch.randperm(30, generator=generator)[:k], generator) for _ in range(size)], k
    )


def ties(size: int, generator: torch.Generator) -> Case:
    case = overlapping(size, generator)
    return Case([dense.sign() for dense in case.locals], case.k)


def everything(size: int, generator: torch.Generator) -> Case:
    return Case([torch.randint(-4, 5, (33,), generator=generator).double() for _ in range(size)], 33)


def cancelling(size: int, generator: torch.Generator) -> Case:
    one = scattered(40, torch.arange(40), generator)
    return Case([one * (1 if rank % 2 else -1) for rank in range(size)], 40)


def fewer_entries_than_ranks(size: int, generator: torch.Generator) -> Case:
    return Case([scattered(3, torch.randint(0, 3, (1,), generator=generator), generator) for _ in range(size)], 1)


def ranks_far_apart(size: int, generator: torch.Generator) -> Case:
    """All ranks have entries at the front, except the last one, which has them at the back."""
    numel, k = 2000, 16
    starts = [0] * (size - 1) + [numel - 100]
    return Case(
        [scattered(numel, start + torch.randperm(100, generator=generator)[:k], generator) for start in starts], k
    )


PATTERNS = {
    f.__name__: f
    for f in (
        disjoint,
        identical,
        overlapping,
        one_rank_empty,
        all_empty,
        one_region,
        ties,
        everything,
        cancelling,
        fewer_entries_than_ranks,
        ranks_far_apart,
    )
}


def run_case(size: int, start: int, stop: int, numel: int, generator: torch.Generator) -> Case:
    """Return a case in which all ranks send the same range of consecutive entries, zeros included."""
    locals_ = [torch.zeros(numel, dtype=torch.float64) for _ in range(size)]
    for dense in locals_:
        dense[start:stop] = torch.randint(-8, 9, (stop - start,), generator=generator).double()
    return Case(locals_, stop - start, (start, stop))


RUNS = {  # start, stop, numel
    "everything": (0, 70, 70),
    "first": (0, 40, 120),
    "in between": (37, 77, 120),
    "last": (81, 120, 120),
    "fewer entries than ranks": (7, 9, 30),
    "several chunks": (1000, 6001, 9000),
}


VECTORS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda generator: torch.randn(5000, generator=generator),
    "mostly zero": lambda generator: (
        torch.randn(5000, generator=generator) * (torch.rand(5000, generator=generator) < 0.001)
    ),
    "all zero": lambda generator: torch.zeros(5000),
    "ties": lambda generator: torch.randn(5000, generator=generator).sign(),
    "constant": lambda generator: torch.full((5000,), -2.5),
    "one entry": lambda generator: torch.tensor([3.0]),
    "two scales": lambda generator: torch.cat([torch.randn(2500, generator=generator), torch.full((2500,), 1e-6)]),
    "subnormal": lambda generator: torch.randn(5000, generator=generator) * 1e-42,
    "float64": lambda generator: torch.randn(5000, generator=generator, dtype=torch.float64),
}
"""Accumulated gradients that have broken selectors."""
