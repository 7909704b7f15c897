"""Adds a gradient, which may be in several pieces, to the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, index_dtype, kernels, zeros
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of residuals, at least float32: half precision would lose small leftovers."""
    return dtype if dtype == torch.float64 else torch.float32


def wide_zeros(grad: Pieces, count: int) -> list[Tensor]:
    """Return `count` vectors of a gradient's length, at least float32."""
    return [zeros(grad.numel, wide(grad.dtype), grad.device) for _ in range(count)]


def check_like(grad: Pieces, residual: Tensor) -> None:
    """Raise if a state belongs to another gradient. Kernels do not check, and would read past its end."""
    if grad.numel != residual.numel() or wide(grad.dtype) != residual.dtype or grad.device != residual.device:
        raise InputError(
            f"the state belongs to another gradient: it has {residual.numel()} entries, {residual.dtype}, "
            f"{residual.device}; the gradient has {grad.numel} entries, {grad.dtype}, {grad.device}"
        )


def add(
    residual: Tensor, grad: Pieces, out: Tensor, floor: float | None, expected: int, *, clear: bool
) -> Entries | None:
    """Compute `out = residual + grad`, with zeros for withheld pieces. Returns the entries not below the floor.

    Returns None without a floor, or if there are too many such entries. They are only a hint: which ones are collected
    depends on the pieces, which ones a selector selects does not. With `clear` the gradient is zero afterwards.
    """
    found: list[Entries] = []
    collecting = floor is not None
    for start, stop, values, withheld in grad:
        if withheld:
            out[start:stop] = 0
            if clear:
                values.zero_()
            continue
        part_floor = floor if collecting else None
        vectors = residual[start:stop], values, out[start:stop]
        entries = _add_part(*vectors, part_floor, min(expected, stop - start), clear)
        collecting = collecting and entries is not None
        if collecting and entries is not None:
            found.append((entries[0].to(index_dtype(out.numel())) + start, entries[1]) if start else entries)
    if not collecting:
        return None
    if len(found) == 1:
        return found[0]
    nothing = SparseVector.empty(out.numel(), out)
    return SparseVector.concatenate([nothing, *(SparseVector.trusted(part, out.numel()) for part in found)]).entries


def _add_part(
    residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int, clear: bool
) -> Entries | None:
    if grad.dtype == out.dtype:
        return kernels(residual, grad, out).accumulate(residual, grad, out, floor, expected, clear)
    torch.add(residual, grad, out=out)
    if clear:
        grad.zero_()
    return None if floor is None else kernels(out).compact(out, floor, expected)
