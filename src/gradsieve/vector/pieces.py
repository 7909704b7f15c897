"""A flat vector in several tensors: a group of gradients whose parameters are in several DDP buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.vector import SparseVector


class Piece(NamedTuple):
    """Entries `[start, stop)` of the whole vector, in one tensor."""

    start: int
    stop: int
    values: Tensor
    withheld: bool  # whether these entries take no part in this step, so that their residual stays as it is


class Pieces:
    """One vector made of 1-D contiguous tensors of the same dtype and device, end to end."""

    def __init__(self, tensors: Sequence[Tensor], withheld: Sequence[bool] | None = None) -> None:
        self._pieces: list[Piece] = []
        self.numel = 0
        for tensor, flag in zip(tensors, withheld or [False] * len(tensors), strict=True):
            self._append(tensor, flag)
        if not self._pieces:
            raise InputError("a vector in pieces needs at least one entry, got none")
        self.dtype = tensors[0].dtype
        self.device = tensors[0].device

    def _append(self, values: Tensor, withheld: bool) -> None:
        """Add a piece, or extend the last one if this one follows it in memory as well."""
        if values.numel() == 0:
            return
        start, self.numel = self.numel, self.numel + values.numel()
        if self._pieces and self._pieces[-1].withheld == withheld and _follows(values, self._pieces[-1].values):
            start, _, before, _ = self._pieces.pop()
            values = before.as_strided((before.numel() + values.numel(),), (1,))
        self._pieces.append(Piece(start, self.numel, values, withheld))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @property
    def whole(self) -> Tensor | None:
        """The tensor that holds the whole vector, or None if there are several."""
        return self._pieces[0].values if len(self._pieces) == 1 else None

    def has_memory_of(self, other: Pieces) -> bool:
        """Whether both are the same entries in the same memory, so that writing to one overwrites the other."""
        return [_memory(piece.values) for piece in self] == [_memory(piece.values) for piece in other]

    def copied_to(self, out: Tensor) -> Tensor:
        """Copy the values to one tensor and return it."""
        for piece in self._pieces:
            out[piece.start : piece.stop] = piece.values
        return out

    def write_mean_(self, total: SparseVector, size: int, *, is_clear: bool = False) -> None:
        """Overwrite with `total / size`, zeros included. Only here a sum becomes a mean.

        Args:
            total: The sum over all ranks.
            size: The number of ranks.
            is_clear: Whether all entries are known to be zero, so that only those of `total` are written.
        """
        if total.is_run:
            self._write_run_(total, size, is_clear)
            return
        mean = SparseVector.trusted((total.indices, total.values / size), total.numel)
        for piece, part in zip(self._pieces, self._cut(mean), strict=True):
            if is_clear:
                part.put_in_(piece.values)
            else:
                part.write_to_(piece.values)

    def _write_run_(self, total: SparseVector, size: int, is_clear: bool) -> None:
        """Write slices. A total in blocks is written block by block, without joining them."""
        for piece in self._pieces:
            start, stop = (min(max(at, piece.start), piece.stop) - piece.start for at in total.span)
            if not is_clear:
                piece.values[:start].zero_()
                piece.values[stop:].zero_()
            for block in total.blocks:
                first, last = (min(max(at, piece.start), piece.stop) for at in block.span)
                if first < last and (first, last) == block.span:
                    block._mean_to_(piece.values[first - piece.start : last - piece.start], size)
                elif first < last:
                    shared = block.values[first - block.span[0] : last - block.span[0]]
                    torch.div(shared, size, out=piece.values[first - piece.start : last - piece.start])

    def _cut(self, vector: SparseVector) -> list[SparseVector]:
        """The part of a vector that belongs to each piece, with indices relative to the piece."""
        if len(self._pieces) == 1:
            return [vector]
        parts = vector.split([0, *(piece.stop for piece in self._pieces)])
        return [
            SparseVector.trusted((part.indices - piece.start, part.values), piece.stop - piece.start)
            for piece, part in zip(self._pieces, parts, strict=True)
        ]


def _memory(values: Tensor) -> tuple[int, int]:
    return values.data_ptr(), values.numel()


def _follows(values: Tensor, before: Tensor) -> bool:
    return (
        values.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and values.storage_offset() == before.storage_offset() + before.numel()
    )
