"""Vectors that are known by what they are made of: entries are made only if they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from gradsieve.kernels import Entries, kernels
from gradsieve.vector.sparse import SparseVector
from gradsieve.vector.sums import add


class Deferred(SparseVector):
    """A vector that is known by what it is made of: `entries`, which each kind makes if asked for, is all it has."""

    @property
    def indices(self) -> Tensor:
        """See `SparseVector.indices`."""
        return self.entries[0]

    @property
    def values(self) -> Tensor:
        """See `SparseVector.values`."""
        return self.entries[1]

    @property
    def is_run(self) -> bool:
        """See `SparseVector.is_run`."""
        return False


class Remainder(Deferred):
    """Another vector but for some entries: to settle a step, those are enough."""

    _whole: SparseVector
    _places: Tensor
    _left: Tensor | None

    def __init__(self, whole: SparseVector, places: Tensor, left: Tensor | None = None) -> None:
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_left", left)
        object.__setattr__(self, "numel", whole.numel)

    @cached_property
    def entries(self) -> Entries:
        """See `SparseVector.entries`."""
        untouched = kernels(self._whole.values).exclude(self._whole.entries, self._places)
        if self._left is None:
            return untouched
        stays = self._left != 0
        left = self._places[stays], self._left[stays]
        return add(SparseVector.trusted(part, self.numel) for part in (untouched, left)).entries

    def changed_of(self, whole: SparseVector) -> tuple[Tensor, Tensor | None] | None:
        """See `SparseVector.changed_of`."""
        return (self._places, self._left) if whole is self._whole else None


class Sum(Deferred):
    """Several vectors."""

    _parts: tuple[SparseVector, ...]

    def __init__(self, parts: Sequence[SparseVector]) -> None:
        object.__setattr__(self, "_parts", tuple(parts))
        object.__setattr__(self, "numel", parts[0].numel)

    @cached_property
    def entries(self) -> Entries:
        """See `SparseVector.entries`."""
        return add(self._parts).entries

    @property
    def parts(self) -> Sequence[SparseVector]:
        """See `SparseVector.parts`."""
        return self._parts


class DeferredRun(SparseVector):
    """A run whose values are made if they are asked for, each kind in its own way."""

    _count: int

    def _set_run(self, start: int, count: int, numel: int) -> None:
        for name, value in (("_indices", None), ("_start", start), ("_count", count), ("numel", numel)):
            object.__setattr__(self, name, value)

    @cached_property
    def _made(self) -> Tensor:
        raise NotImplementedError

    @property
    def values(self) -> Tensor:
        """See `SparseVector.values`."""
        return self._made

    @property
    def nnz(self) -> int:
        """See `SparseVector.nnz`."""
        return self._count


class Chain(DeferredRun):
    """Runs that follow each other, as one."""

    _links: tuple[SparseVector, ...]

    def __init__(self, runs: Sequence[SparseVector]) -> None:
        object.__setattr__(self, "_links", tuple(link for run in runs for link in run.blocks))
        self._set_run(runs[0].span[0], sum(run.nnz for run in runs), runs[0].numel)

    @cached_property
    def _made(self) -> Tensor:
        parts = [link.values for link in self._links]
        return kernels(*parts).joined(parts)

    @property
    def blocks(self) -> Sequence[SparseVector]:
        """See `SparseVector.blocks`."""
        return self._links

    def all_finite(self) -> bool:
        """See `SparseVector.all_finite`: without joining the links."""
        return all(link.all_finite() for link in self._links)

    def _copy_to_(self, target: Tensor) -> None:
        for link in self._links:
            start, stop = link.span
            link._copy_to_(target[start - self._start : stop - self._start])


class Difference(DeferredRun):
    """What a run has more than a rounded copy of it, zeros included; to settle a step, the two are enough.

    It is computed from both when it is asked for: until then neither may change.
    """

    _whole: SparseVector
    _seen: SparseVector

    def __init__(self, whole: SparseVector, seen: SparseVector) -> None:
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_seen", seen)
        self._set_run(whole.span[0], whole.nnz, whole.numel)

    @cached_property
    def _made(self) -> Tensor:
        made = self._whole.values.clone()
        self._seen._add_to_(made, subtract=True)
        return made

    def _copy_to_(self, target: Tensor) -> None:
        if target.data_ptr() != self._whole.values.data_ptr():
            target.copy_(self._whole.values)
        self._seen._add_to_(target, subtract=True)
