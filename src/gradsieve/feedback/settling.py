"""Computes the new residual of a rank after a reduction."""

from __future__ import annotations

from torch import Tensor

from gradsieve.kernels import kernels
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


def take_off_(accumulated: Tensor, sent: SparseVector, leftover: SparseVector) -> None:
    """Subtract what was sent from the vector that it was selected from, and add the leftover."""
    parts = list(leftover.parts)
    changes = [part.change_from(sent) for part in parts]
    number = next((at for at, change in enumerate(changes) if change is not None), 0)
    kept, change = parts.pop(number), changes[number]
    # The leftover may have to be computed from what was sent, which may be in the memory of `accumulated` itself.
    more = [part.entries for part in parts if part.nnz]
    if change is None:
        _replace_(accumulated, sent, kept)
    else:
        change.apply_(accumulated)
    nothing = SparseVector.empty(accumulated.numel(), accumulated)
    for entries in more:
        kernels(accumulated).settle_(accumulated, nothing.entries, entries)


def _replace_(accumulated: Tensor, sent: SparseVector, leftover: SparseVector) -> None:
    if sent.is_run and leftover.is_run and sent.span == leftover.span:
        leftover.put_in_(accumulated)
    elif sent.is_run and leftover.nnz == 0:
        accumulated[slice(*sent.span)].zero_()
    else:
        kernels(accumulated).settle_(accumulated, sent.entries, leftover.entries)


def keep_withheld_(grad: Pieces, old: Tensor, new: Tensor) -> None:
    """Copy the old values of withheld pieces, which had no part in the step."""
    for start, stop, _, withheld in grad:
        if withheld:
            new[start:stop] = old[start:stop]
