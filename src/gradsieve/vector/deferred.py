"""Vectors that hold what they are computed from: their entries are computed only when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries, kernels
from gradsieve.vector.change import Change, Removed
from gradsieve.vector.sparse import SparseVector
from gradsieve.vector.sums import add


class Deferred(SparseVector):
    """A vector with indices. A subclass computes `entries`, and everything else follows from them."""

    @property
    @override
    def indices(self) -> Tensor:
        return self.entries[0]

    @property
    @override
    def values(self) -> Tensor:
        return self.entries[1]

    @property
    @override
    def is_run(self) -> bool:
        return False


class Remainder(Deferred):
    """Another vector, except for some entries. To settle a step, the change alone is enough."""

    _whole: SparseVector
    _change: Change

    def __init__(self, whole: SparseVector, change: Change) -> None:
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_change", change)
        object.__setattr__(self, "numel", whole.numel)

    @cached_property
    @override
    def entries(self) -> Entries:
        change = self._change
        unchanged = kernels(self._whole.values).exclude(self._whole.entries, change.positions)
        if isinstance(change, Removed):
            return unchanged
        stays = change.values != 0
        replaced = change.positions[stays], change.values[stays]
        return add(SparseVector.trusted(part, self.numel) for part in (unchanged, replaced)).entries

    @override
    def change_from(self, other: SparseVector) -> Change | None:
        return self._change if self._whole.shares_entries_with(other) else None


class Sum(Deferred):
    """The sum of one or more vectors."""

    _parts: tuple[SparseVector, ...]

    def __init__(self, parts: Sequence[SparseVector]) -> None:
        object.__setattr__(self, "_parts", tuple(parts))
        object.__setattr__(self, "numel", parts[0].numel)

    @cached_property
    @override
    def entries(self) -> Entries:
        return add(self._parts).entries

    @property
    @override
    def parts(self) -> Sequence[SparseVector]:
        return self._parts


class DeferredRun(SparseVector, ABC):
    """A run whose values a subclass computes when they are read."""

    _count: int

    def _set_run(self, start: int, count: int, numel: int) -> None:
        for name, value in (("_indices", None), ("_start", start), ("_count", count), ("numel", numel)):
            object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def _made(self) -> Tensor:
        """The values. A subclass computes them once."""

    @property
    @override
    def values(self) -> Tensor:
        return self._made

    @property
    @override
    def nnz(self) -> int:
        return self._count


class Chain(DeferredRun):
    """Runs that follow each other without a gap, as one run."""

    _links: tuple[SparseVector, ...]

    def __init__(self, runs: Sequence[SparseVector]) -> None:
        object.__setattr__(self, "_links", tuple(link for run in runs for link in run.blocks))
        self._set_run(runs[0].span[0], sum(run.nnz for run in runs), runs[0].numel)

    @cached_property
    @override
    def _made(self) -> Tensor:
        parts = [link.values for link in self._links]
        return kernels(*parts).joined(parts)

    @property
    @override
    def blocks(self) -> Sequence[SparseVector]:
        return self._links

    @override
    def all_finite(self) -> bool:
        return all(link.all_finite() for link in self._links)

    @override
    def _copy_to_(self, target: Tensor) -> None:
        for link in self._links:
            start, stop = link.span
            link._copy_to_(target[start - self._start : stop - self._start])


class Difference(DeferredRun):
    """A run minus a run at the same indices, zeros included. Neither may change until the values are read."""

    _given: SparseVector
    _decoded: SparseVector

    def __init__(self, given: SparseVector, decoded: SparseVector) -> None:
        object.__setattr__(self, "_given", given)
        object.__setattr__(self, "_decoded", decoded)
        self._set_run(given.span[0], given.nnz, given.numel)

    @cached_property
    @override
    def _made(self) -> Tensor:
        made = self._given.values.clone()
        self._decoded._add_to_(made, subtract=True)
        return made

    @override
    def _copy_to_(self, target: Tensor) -> None:
        if target.data_ptr() != self._given.values.data_ptr():  # settling subtracts in the residual itself
            target.copy_(self._given.values)
        self._decoded._add_to_(target, subtract=True)
