"""Computes the new residual of a rank after a reduction."""

from __future__ import annotations

from torch import Tensor

from gradsieve.kernels import kernels
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


def take_off_(accumulated: Tensor, sent: SparseVector, leftover: SparseVector) -> None:
    """Subtract the sent entries and add the leftover, in place."""
    kept, *others = leftover.parts
    # First, since a leftover may be computed from the sent entries, which may share the memory of `accumulated`.
    more = [other.entries for other in others if other.nnz]
    changed = kept.changed_of(sent)
    if changed is None:
        _replace_(accumulated, sent, kept)
    else:
        positions, left = changed
        if left is None:
            kernels(accumulated).clear_(accumulated, positions)
        else:
            kernels(accumulated).put_(accumulated, positions, left)
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
