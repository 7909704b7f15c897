"""A vector that is mostly zero: what selectors, reducers and feedback pass to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, index_dtype, kernels
from gradsieve.vector.change import Change, Removed


@dataclass(frozen=True, eq=False)
class SparseVector:
    """`values` at strictly increasing `indices` of a vector of `numel` entries; the rest is zero.

    The constructor checks its arguments. A run, whose indices follow each other without a gap, holds no index array:
    `SparseVector.run(values, start, numel)` makes one, and `SparseVector.full(values)` makes the run of all entries.
    The `indices` of a run are computed each time they are read.

    Args:
        indices: Strictly increasing positions in `[0, numel)`, 1-D, int32 or int64. They are stored in the narrowest
            type that holds every index of the vector.
        values: As many floating-point values, 1-D. They are not copied.
        numel: The length of the vector, zeros included.

    Raises:
        InputError: If shapes, types or the order of the indices are wrong.

    Example:
        >>> import torch
        >>> from gradsieve import SparseVector
        >>> vector = SparseVector(torch.tensor([1, 4]), torch.tensor([2.0, -3.0]), numel=6)
        >>> vector.to_dense()
        tensor([ 0.,  2.,  0.,  0., -3.,  0.])
    """

    _indices: Tensor | None
    values: Tensor
    numel: int
    _start: int  # the first index of a run

    def __init__(self, indices: Tensor, values: Tensor, numel: int) -> None:
        checked = _checked(indices, values, numel)
        self._set(checked, values, numel)

    @classmethod
    def trusted(cls, entries: Entries, numel: int) -> SparseVector:
        """A vector of entries that are known to be well formed, such as a kernel's result: nothing is checked."""
        vector = object.__new__(cls)
        vector._set(*entries, numel)
        return vector

    @classmethod
    def run(cls, values: Tensor, start: int, numel: int) -> SparseVector:
        """The entries `[start, start + values.numel())`, zeros included, without an index array and without a copy."""
        if values.dim() != 1 or not 0 <= start <= numel - values.numel():
            raise InputError(f"a run must be in [0, {numel}), got shape {tuple(values.shape)} starting at {start}")
        vector = object.__new__(cls)
        vector._set(None, values, numel, start)
        return vector

    @classmethod
    def full(cls, values: Tensor) -> SparseVector:
        """The run of all entries of a dense vector."""
        return cls.run(values, 0, values.numel())

    @classmethod
    def empty(cls, numel: int, like: Tensor) -> SparseVector:
        """A vector without entries, on the device and with the dtype of `like`."""
        indices = torch.empty(0, dtype=index_dtype(numel), device=like.device)
        return cls.trusted((indices, torch.empty(0, dtype=like.dtype, device=like.device)), numel)

    @classmethod
    def concatenate(cls, parts: Sequence[SparseVector]) -> SparseVector:
        """Join parts of one vector whose index ranges follow each other. Runs without a gap between them give a run."""
        from gradsieve.vector.deferred import Chain

        filled = [part for part in parts if part.nnz] or parts[:1]
        if len(filled) == 1:
            return filled[0]
        if all(a.is_run and b.is_run and a.span[1] == b.span[0] for a, b in pairwise(filled)):
            return Chain(filled)
        joined = kernels(parts[0].values).joined
        entries = joined([part.indices for part in parts]), joined([part.values for part in parts])
        return cls.trusted(entries, parts[0].numel)

    @property
    def indices(self) -> Tensor:
        """Strictly increasing positions."""
        if self._indices is None:
            return torch.arange(*self.span, dtype=index_dtype(self.numel), device=self.values.device)
        return self._indices

    @property
    def entries(self) -> Entries:
        """Indices and values."""
        return self.indices, self.values

    @property
    def nnz(self) -> int:
        """The number of stored entries."""
        return self.values.numel()

    @property
    def is_run(self) -> bool:
        """Whether the indices follow each other without a gap and are not stored."""
        return self._indices is None

    @property
    def is_full(self) -> bool:
        """Whether this is the run of all entries."""
        return self.is_run and self.nnz == self.numel

    @property
    def span(self) -> tuple[int, int]:
        """The index range of a run, and `(0, numel)` for any other vector."""
        return (self._start, self._start + self.nnz) if self.is_run else (0, self.numel)

    @property
    def extent(self) -> tuple[int, int]:
        """The first index, and the last index plus one. The vector must have entries."""
        return self.span if self.is_run else (int(self.indices[0]), int(self.indices[-1]) + 1)

    @property
    def blocks(self) -> Sequence[SparseVector]:
        """The vectors that give this one if they are joined end to end."""
        return (self,)

    def __repr__(self) -> str:
        kind = str(self.values.dtype).removeprefix("torch.")
        return f"SparseVector(nnz={self.nnz}, numel={self.numel}, {kind}, {self.values.device})"

    def to_dense(self) -> Tensor:
        """A new dense tensor of `numel` entries."""
        dense = torch.empty(self.numel, dtype=self.values.dtype, device=self.values.device)
        self.write_to_(dense)
        return dense

    def write_to_(self, dense: Tensor) -> None:
        """Overwrite a dense tensor with this vector, zeros included."""
        self._check_room(dense)
        if self.is_run:
            start, stop = self.span
            dense[:start].zero_()
            dense[stop:].zero_()
            self._copy_to_(dense[start:stop])
        else:
            kernels(dense, self.values).write_sparse_(dense, self.indices, self.values)

    def put_in_(self, dense: Tensor) -> None:
        """Overwrite a dense tensor at the indices of this vector, and leave the rest as it is."""
        self._check_room(dense)
        if self.is_run:
            self._copy_to_(dense[slice(*self.span)])
        else:
            kernels(dense, self.values).put_(dense, self.indices, self.values)

    def all_finite(self) -> bool:
        """Whether no value is infinite or NaN."""
        return kernels(self.values).all_finite(self.values)

    def _copy_to_(self, target: Tensor) -> None:
        """Overwrite a tensor of `nnz` entries with the values."""
        target.copy_(self.values)

    def _add_to_(self, target: Tensor, offset: int = 0, *, subtract: bool = False) -> None:
        """Add to a tensor, or subtract from it, as many values as it has entries, starting with the one at `offset`."""
        values = self.values[offset : offset + target.numel()]
        torch.sub(target, values, out=target) if subtract else torch.add(target, values, out=target)

    def _mean_to_(self, target: Tensor, size: int) -> None:
        """Overwrite a tensor of `nnz` entries with `values / size`."""
        torch.div(self.values, size, out=target)

    def top(self, k: int) -> tuple[SparseVector, SparseVector]:
        """The k entries of largest magnitude, and the others. Among equals the lower index comes first."""
        kept, dropped = kernels(self.values).cut(*self.entries, k)
        return SparseVector.trusted(kept, self.numel), SparseVector.trusted(dropped, self.numel)

    def above(self, threshold: float) -> SparseVector:
        """The entries whose magnitude is at least the threshold, and NaN. Zeros only if the threshold is zero."""
        if threshold <= 0:
            return self
        return SparseVector.trusted(kernels(self.values).above(self.entries, threshold), self.numel)

    def split(self, bounds: Sequence[int]) -> list[SparseVector]:
        """Cut at bounds, one more than there are parts. Part i has the indices in `[bounds[i], bounds[i+1])`."""
        if self.is_run:
            start, stop = self.span
            ends = [min(max(bound, start), stop) for bound in bounds]
            return [SparseVector.run(self.values[a - start : b - start], a, self.numel) for a, b in pairwise(ends)]
        edges, indices = _positions(self.indices, bounds), self.indices
        return [SparseVector.trusted((indices[a:b], self.values[a:b]), self.numel) for a, b in pairwise(edges)]

    def with_values(self, parts: Sequence[Tensor]) -> SparseVector:
        """Other values at the same indices, given in parts that follow each other."""
        if self.is_run:
            starts = accumulate((part.numel() for part in parts), initial=self._start)
            runs = [SparseVector.run(part, at, self.numel) for at, part in zip(starts, parts, strict=False)]
            return SparseVector.concatenate(runs)
        return SparseVector.trusted((self.indices, kernels(self.values).joined(parts)), self.numel)

    def without(self, other: SparseVector) -> SparseVector:
        """The entries at indices that `other` does not have."""
        from gradsieve.vector.deferred import Remainder

        if other.covers(self):
            return SparseVector.empty(self.numel, self.values)
        return Remainder(self, Removed(kernels(self.values).shared(self.indices, other.indices)))

    def change_from(self, other: SparseVector) -> Change | None:
        """How this vector differs from `other`, or None if that is unknown."""
        return None

    def shares_entries_with(self, other: SparseVector) -> bool:
        """Whether both vectors have the same entries because they are held in the same memory.

        Copies of the object share its entries. Equal entries in different memory count as different.
        """
        if self.numel != other.numel or self.is_run != other.is_run or not _same_memory(self.values, other.values):
            return False
        return self.span == other.span if self.is_run else _same_memory(self.indices, other.indices)

    @property
    def parts(self) -> Sequence[SparseVector]:
        """The vectors whose sum this one is."""
        return (self,)

    def covers(self, other: SparseVector) -> bool:
        """Whether this is a run that has every index of `other`."""
        if not self.is_run or other.nnz == 0:
            return other.nnz == 0
        start, stop = other.extent
        return self.span[0] <= start and stop <= self.span[1]

    def _check_room(self, dense: Tensor) -> None:
        if dense.shape != (self.numel,) or not dense.is_contiguous():
            raise InputError(
                f"a vector of {self.numel} entries needs a contiguous tensor of that length to be written to, "
                f"got shape {tuple(dense.shape)}, stride {dense.stride()}"
            )

    def _set(self, indices: Tensor | None, values: Tensor, numel: int, start: int = 0) -> None:
        object.__setattr__(self, "_indices", indices)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "_start", start)


def _positions(indices: Tensor, bounds: Sequence[int]) -> list[int]:
    """The number of indices below each bound."""
    if indices.device.type == "cpu":  # a call of NumPy takes less time than one of torch
        array = indices.numpy()
        return list(map(int, np.searchsorted(array, np.array(bounds, array.dtype))))
    targets = torch.tensor(bounds, dtype=indices.dtype, device=indices.device)
    return list(map(int, torch.searchsorted(indices, targets)))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two 1-D tensors are views of the same elements."""
    same_elements = a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.stride() == b.stride()
    return same_elements and a.dtype == b.dtype and a.device == b.device


def _checked(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The indices in their canonical dtype; raises if an argument is wrong."""
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
