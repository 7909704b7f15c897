"""Sums of sparse vectors."""

from __future__ import annotations

from collections.abc import Iterable

from gradsieve.errors import InputError
from gradsieve.kernels import kernels
from gradsieve.vector.sparse import SparseVector

ADDED_AT_ONCE = 8  # vectors to wait for before adding: more saves passes, fewer overlaps better with receiving


def add(vectors: Iterable[SparseVector]) -> SparseVector:
    """The sum of one or more vectors, in the order given.

    The order is part of the result: floating-point sums depend on it, so every rank that repeats a sum must give the
    vectors in the same order. Vectors may arrive while earlier ones are being added: a few at a time are.
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
        parts = [vector.values for vector in filled]
        return SparseVector.run(kernels(*parts).sum_dense(parts), filled[0].span[0], numel)
    entries = kernels(*(vector.values for vector in filled)).sum_runs([vector.entries for vector in filled])
    return SparseVector.trusted(entries, numel)
