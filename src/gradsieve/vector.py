"""A vector that is mostly zero: the currency between selectors, reducers and feedback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, index_dtype, kernels

ADDED_AT_ONCE = 8  # vectors to wait for before adding: more saves passes, fewer overlaps better with receiving


@dataclass(frozen=True, eq=False)
class SparseVector:
    """`values` at strictly increasing `indices` of a vector of `numel` entries; the rest is zero.

    The constructor checks what it is given. A vector that has every entry holds no indices in memory: make it with
    `SparseVector.full(values)`, and `indices` is computed when asked for.
    """

    _indices: Tensor | None
    values: Tensor
    numel: int

    def __init__(self, indices: Tensor, values: Tensor, numel: int) -> None:
        checked = _checked(indices, values, numel)
        self._set(checked, values, numel)

    @classmethod
    def trusted(cls, entries: Entries, numel: int) -> SparseVector:
        """Entries that are known to be well formed, such as a kernel's result."""
        vector = object.__new__(cls)
        vector._set(*entries, numel)
        return vector

    @classmethod
    def full(cls, values: Tensor) -> SparseVector:
        """Every entry of a dense vector, zeros included, without index arrays and without a copy."""
        vector = object.__new__(cls)
        vector._set(None, values, values.numel())
        return vector

    @classmethod
    def empty(cls, numel: int, like: Tensor) -> SparseVector:
        """No entries, on the device and with the dtype of `like`."""
        indices = torch.empty(0, dtype=index_dtype(numel), device=like.device)
        return cls.trusted((indices, torch.empty(0, dtype=like.dtype, device=like.device)), numel)

    @classmethod
    def concatenate(cls, parts: Sequence[SparseVector]) -> SparseVector:
        """Parts of one vector whose index ranges follow each other."""
        joined = kernels(parts[0].values).joined
        entries = joined([part.indices for part in parts]), joined([part.values for part in parts])
        return cls.trusted(entries, parts[0].numel)

    @property
    def indices(self) -> Tensor:
        """Strictly increasing positions."""
        if self._indices is None:
            return torch.arange(self.numel, dtype=index_dtype(self.numel), device=self.values.device)
        return self._indices

    @property
    def entries(self) -> Entries:
        """Indices and values."""
        return self.indices, self.values

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return self.values.numel()

    @property
    def is_full(self) -> bool:
        """Whether every entry is stored and indices are implied."""
        return self._indices is None

    def __repr__(self) -> str:
        kind = str(self.values.dtype).removeprefix("torch.")
        return f"SparseVector(nnz={self.nnz}, numel={self.numel}, {kind}, {self.values.device})"

    def to_dense(self) -> Tensor:
        """A new dense tensor of `numel` entries."""
        if self.is_full:
            return self.values.clone()
        dense = torch.empty(self.numel, dtype=self.values.dtype, device=self.values.device)
        self.write_to_(dense)
        return dense

    def write_to_(self, dense: Tensor) -> None:
        """Overwrite a dense tensor with this vector, zeros included."""
        self._check_room(dense)
        if self.is_full:
            dense.copy_(self.values)
        else:
            kernels(dense, self.values).write_sparse_(dense, self.indices, self.values)

    def put_in_(self, dense: Tensor) -> None:
        """Overwrite the entries of a dense tensor that this vector has."""
        self._check_room(dense)
        if self.is_full:
            dense.copy_(self.values)
        else:
            kernels(dense, self.values).put_(dense, self.indices, self.values)

    def top(self, k: int) -> tuple[SparseVector, SparseVector]:
        """The k entries of largest magnitude, and the others; among equals the lower index is kept."""
        kept, dropped = kernels(self.values).cut(*self.entries, k)
        return SparseVector.trusted(kept, self.numel), SparseVector.trusted(dropped, self.numel)

    def above(self, threshold: float) -> SparseVector:
        """The entries whose magnitude is not below the threshold; NaN always, zeros only if the threshold is zero."""
        if threshold <= 0:
            return self
        return SparseVector.trusted(kernels(self.values).above(self.entries, threshold), self.numel)

    def split(self, bounds: Sequence[int]) -> list[SparseVector]:
        """Cut at index bounds (offsets, one more than parts): part i has the indices in `[bounds[i], bounds[i+1])`."""
        edges = list(bounds) if self.is_full else _places(self.indices, bounds)
        indices = self.indices
        return [SparseVector.trusted((indices[a:b], self.values[a:b]), self.numel) for a, b in pairwise(edges)]

    def with_values(self, parts: Sequence[Tensor]) -> SparseVector:
        """Other values, in parts that follow each other, at the same indices."""
        return SparseVector.trusted((self.indices, kernels(self.values).joined(parts)), self.numel)

    def without(self, other: SparseVector) -> SparseVector:
        """The entries at indices that `other` does not have."""
        if other.is_full:
            return SparseVector.empty(self.numel, self.values)
        return Remainder(self, kernels(self.values).shared(self.indices, other.indices))

    def changed_of(self, whole: SparseVector) -> tuple[Tensor, Tensor | None] | None:
        """Where this vector differs from `whole` and what it has there, None for nothing; None if that is not known."""
        return None

    @property
    def parts(self) -> Sequence[SparseVector]:
        """Vectors whose sum this one is."""
        return (self,)

    def beyond(self, seen: SparseVector) -> SparseVector:
        """What this vector has more than `seen`, which is it or a rounded copy of it."""
        if seen is self:
            return SparseVector.empty(self.numel, self.values)
        return SparseVector.trusted(kernels(self.values).beyond(self.entries, seen.values), self.numel)

    def undelivered(self, seen: SparseVector, total: SparseVector) -> SparseVector:
        """What is to be kept of this vector when others saw `seen`, and `total` has come of it.

        The entries that `total` does not have, and of those it has what was rounded away.
        """
        if seen is self:
            return self.without(total)
        if total.is_full:
            return self.beyond(seen)
        return Remainder(self, *kernels(self.values).rounded_off(self.entries, seen.values, total.indices))

    def _check_room(self, dense: Tensor) -> None:
        if dense.shape != (self.numel,) or not dense.is_contiguous():
            raise InputError(
                f"a vector of {self.numel} entries needs a contiguous tensor of that length to be written to, "
                f"got shape {tuple(dense.shape)}, stride {dense.stride()}"
            )

    def _set(self, indices: Tensor | None, values: Tensor, numel: int) -> None:
        object.__setattr__(self, "_indices", indices)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "numel", numel)


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
    def is_full(self) -> bool:
        """See `SparseVector.is_full`."""
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


def _places(indices: Tensor, bounds: Sequence[int]) -> list[int]:
    """How many indices are below each bound."""
    if indices.device.type == "cpu":  # NumPy begins sooner
        array = indices.numpy()
        return list(map(int, np.searchsorted(array, np.array(bounds, array.dtype))))
    targets = torch.tensor(bounds, dtype=indices.dtype, device=indices.device)
    return list(map(int, torch.searchsorted(indices, targets)))


def _sum(vectors: list[SparseVector]) -> SparseVector:
    numel = vectors[0].numel
    for vector in vectors:
        if vector.numel != numel:
            raise InputError(f"cannot add vectors of different length: {numel} and {vector.numel}")
    filled = [vector for vector in vectors if vector.nnz] or vectors[:1]
    if len(filled) == 1:
        return filled[0]
    entries = kernels(*(vector.values for vector in filled)).sum_runs([vector.entries for vector in filled])
    return SparseVector.trusted(entries, numel)


def _checked(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The indices in their canonical dtype, or one sentence about what is wrong."""
    if indices.dim() != 1 or values.dim() != 1:
        raise InputError(f"indices and values must be 1-D, got shapes {tuple(indices.shape)} and {tuple(values.shape)}")
    if indices.numel() != values.numel():
        raise InputError(f"indices and values must have the same length, got {indices.numel()} and {values.numel()}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise InputError(f"indices must be int32 or int64, got {indices.dtype}")
    if not values.dtype.is_floating_point:
        raise InputError(f"values must be floating point, got {values.dtype}")
    if not indices.is_contiguous() or not values.is_contiguous():
        raise InputError("indices and values must be contiguous, got a strided view: call .contiguous()")
    position = kernels(values).first_disorder(indices, 0, numel)
    if position >= 0:
        raise InputError(
            f"indices must be strictly increasing in [0, {numel}), got {int(indices[position])} at position {position}"
        )
    return indices.to(index_dtype(numel))
