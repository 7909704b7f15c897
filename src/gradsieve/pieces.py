"""A flat vector that lies in pieces: how a group of gradients looks when its parameters sit in several DDP buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.vector import SparseVector


class Piece(NamedTuple):
    """Entries `[start, stop)` of the whole, in memory of their own."""

    start: int
    stop: int
    values: Tensor
    withheld: bool  # it has no part in this step: what is owed there stays owed


class Pieces:
    """1-D contiguous tensors of one dtype and device that follow each other; together they are one vector."""

    def __init__(self, tensors: Sequence[Tensor], withheld: Sequence[bool] | None = None) -> None:
        edges = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
        flags = [False] * len(tensors) if withheld is None else withheld
        self._pieces = [
            Piece(*place) for place in zip(edges[:-1], edges[1:], tensors, flags, strict=True) if place[2].numel()
        ]
        if not self._pieces:
            raise InputError("a vector in pieces needs at least one entry, got none")
        self.numel = edges[-1]
        self.dtype = tensors[0].dtype
        self.device = tensors[0].device

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @property
    def whole(self) -> Tensor | None:
        """The one tensor it lies in, if it is one."""
        return self._pieces[0].values if len(self._pieces) == 1 else None

    def copied_to(self, out: Tensor) -> Tensor:
        """Its values in one tensor."""
        for piece in self._pieces:
            out[piece.start : piece.stop] = piece.values
        return out

    def write_mean_(self, total: SparseVector, size: int) -> None:
        """Overwrite with `total / size`, zeros included: the one place where a sum becomes a mean."""
        if total.is_full:
            for piece in self._pieces:
                torch.div(total.values[piece.start : piece.stop], size, out=piece.values)
            return
        mean = SparseVector.trusted((total.indices, total.values / size), total.numel)
        if self.whole is not None:
            mean.write_to_(self.whole)
            return
        parts = mean.split([0, *(piece.stop for piece in self._pieces)])
        for piece, part in zip(self._pieces, parts, strict=True):
            entries = part.indices - piece.start, part.values
            SparseVector.trusted(entries, piece.stop - piece.start).write_to_(piece.values)
