"""Sums of sparse vectors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import kernels
from gradsieve.vector.sparse import SparseVector

ADDED_AT_ONCE = 8  # vectors to collect before they are added: more saves passes, fewer overlaps better with receiving
BLOCK_ENTRIES = 1 << 17  # consecutive entries added at once: half a megabyte of float32 fits a second-level cache


def add(vectors: Iterable[SparseVector]) -> SparseVector:
    """The sum of one or more vectors, in the order given.

    The order is part of the result, because floating-point sums depend on it: ranks that compute the same sum must give
    the vectors in the same order. Vectors may still be arriving: a few at a time are added as they come.
    """
    waiting: list[SparseVector] = []
    for vector in vectors:
        waiting.append(vector)
        if len(waiting) == ADDED_AT_ONCE:
            waiting = [_sum(waiting)]
    if not waiting:
        raise InputError("add needs at least one vector, got none")
    return _sum(waiting)


def _sum(vectors: list[SparseVector]) -> SparseVector:
    numel = vectors[0].numel
    for vector in vectors:
        if vector.numel != numel:
            raise InputError(f"cannot add vectors of different length: {numel} and {vector.numel}")
    filled = [vector for vector in vectors if vector.nnz] or vectors[:1]
    if len(filled) == 1:
        return filled[0]
    if all(vector.is_run and vector.span == filled[0].span for vector in filled):
        return SparseVector.run(_dense_sum(filled), filled[0].span[0], numel)
    entries = kernels(*(vector.values for vector in filled)).sum_runs([vector.entries for vector in filled])
    return SparseVector.trusted(entries, numel)


def _dense_sum(runs: list[SparseVector]) -> Tensor:
    """Block by block, so that partial sums stay in the cache. Starts from zero as `sum_runs` does: no negative zero."""
    first, *others = runs
    total = torch.empty_like(first.values)
    for start in range(0, total.numel(), BLOCK_ENTRIES):
        block = total[start : start + BLOCK_ENTRIES]
        torch.add(first.values[start : start + BLOCK_ENTRIES], 0, out=block)
        for other in others:
            other._add_to_(block, start)
    return total
