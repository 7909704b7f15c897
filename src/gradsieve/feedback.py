"""Error feedback: what was not delivered is added to the next gradient.

Each form keeps a spare for every vector it remembers. A step writes to the spares only, and the state it ends in has
the two changed places: the state before it stays whole, and whoever holds on to it has undone the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, index_dtype, kernels, zeros
from gradsieve.pieces import Pieces
from gradsieve.vector import SparseVector

F = TypeVar("F")


class Feedback(Protocol[F]):
    """Accumulates gradients into what is selected from, and settles what becomes of it."""

    def init(self, grad: Pieces) -> F:
        """The state before the first step, for gradients like this one."""
        ...

    def accumulate(
        self, grad: Pieces, out: Pieces, state: F, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """The vector to select from; with a floor, also its entries that are not below it, about `expected`.

        `out` is where the result of the step will be written, and free to be used until then; it may be `grad` itself,
        whose values are gone then.
        """
        ...

    def settle(self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: F) -> F:
        """The state after a step in which `local` was sent and `leftover` came back; `state` itself stays as it is.

        Of `grad` only the places still count: its values have been overwritten.
        """
        ...

    def vectors(self, state: F) -> dict[str, Tensor]:
        """What is remembered of each entry, by name: what a checkpoint must keep."""
        ...

    def rescale_(self, state: F, factor: float) -> None:
        """Gradients come `factor` times as large from now on, and so must what is owed of them."""
        ...


class NothingKept(NamedTuple):
    """The state of no feedback."""


@dataclass(frozen=True)
class NoFeedback:
    """What is not delivered is lost: for dense exchange, where that is nothing, and to show why feedback matters."""

    def init(self, grad: Pieces) -> NothingKept:
        """See `Feedback.init`."""
        return NothingKept()

    def accumulate(
        self, grad: Pieces, out: Pieces, state: NothingKept, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        if out.whole is None or out.dtype != _wide(grad.dtype):
            return grad.copied_to(torch.empty(grad.numel, dtype=_wide(grad.dtype), device=grad.device)), None
        return out.whole if out is grad else grad.copied_to(out.whole), None

    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: NothingKept
    ) -> NothingKept:
        """See `Feedback.settle`."""
        return state

    def vectors(self, state: NothingKept) -> dict[str, Tensor]:
        """See `Feedback.vectors`."""
        return {}

    def rescale_(self, state: NothingKept, factor: float) -> None:
        """See `Feedback.rescale_`."""


class ResidualState(NamedTuple):
    """What was left over so far, and room for the next accumulation."""

    residual: Tensor
    spare: Tensor


@dataclass(frozen=True)
class Residual:
    """Plain error feedback: the residual is added to the gradient."""

    def init(self, grad: Pieces) -> ResidualState:
        """See `Feedback.init`."""
        return ResidualState(*_wide_zeros(grad, 2))

    def accumulate(
        self, grad: Pieces, out: Pieces, state: ResidualState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        _check_like(grad, state.residual)
        entries = _add(state.residual, grad, state.spare, floor, expected, clear=out is grad)
        out.is_clear = out is grad
        return state.spare, entries

    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: ResidualState
    ) -> ResidualState:
        """See `Feedback.settle`."""
        take_off_(accumulated, local, leftover)
        _keep_withheld_(grad, state.residual, accumulated)
        return ResidualState(accumulated, state.residual)

    def vectors(self, state: ResidualState) -> dict[str, Tensor]:
        """See `Feedback.vectors`."""
        return {"residual": state.residual}

    def rescale_(self, state: ResidualState, factor: float) -> None:
        """See `Feedback.rescale_`."""
        state.residual.mul_(factor)


class MomentumState(NamedTuple):
    """Velocity and residual, and room for the next of each."""

    velocity: Tensor
    residual: Tensor
    spare_velocity: Tensor
    spare: Tensor


@dataclass(frozen=True)
class MomentumResidual:
    """Momentum correction and factor masking, from Deep Gradient Compression (Lin et al., ICLR 2018).

    u = momentum * u + grad; v += u; entries of v are sent; u and v are cleared where they were delivered. It takes the
    place of the optimizer's momentum, whose buffer it uses instead: give it to an optimizer without momentum.
    """

    momentum: float = 0.9  # as the optimizer's; 0 is plain error feedback

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1), got {self.momentum}")

    def init(self, grad: Pieces) -> MomentumState:
        """See `Feedback.init`."""
        return MomentumState(*_wide_zeros(grad, 4))

    def accumulate(
        self, grad: Pieces, out: Pieces, state: MomentumState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        _check_like(grad, state.residual)
        for start, stop, values, _ in grad:
            torch.add(values, state.velocity[start:stop], alpha=self.momentum, out=state.spare_velocity[start:stop])
        torch.add(state.residual, state.spare_velocity, out=state.spare)
        for piece in grad:
            if piece.withheld:
                state.spare[piece.start : piece.stop] = 0
        return state.spare, None

    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: MomentumState
    ) -> MomentumState:
        """See `Feedback.settle`."""
        delivered = _delivered(local, leftover)  # before: a full vector that is sent lies in `accumulated` itself
        take_off_(accumulated, local, leftover)
        take_off_(state.spare_velocity, delivered, SparseVector.empty(local.numel, accumulated))
        _keep_withheld_(grad, state.residual, accumulated)
        _keep_withheld_(grad, state.velocity, state.spare_velocity)
        return MomentumState(state.spare_velocity, accumulated, state.velocity, state.residual)

    def vectors(self, state: MomentumState) -> dict[str, Tensor]:
        """See `Feedback.vectors`."""
        return {"velocity": state.velocity, "residual": state.residual}

    def rescale_(self, state: MomentumState, factor: float) -> None:
        """See `Feedback.rescale_`."""
        state.velocity.mul_(factor)
        state.residual.mul_(factor)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: small leftovers added to large ones in half precision would vanish."""
    return dtype if dtype == torch.float64 else torch.float32


def _wide_zeros(grad: Pieces, count: int) -> list[Tensor]:
    return [zeros(grad.numel, _wide(grad.dtype), grad.device) for _ in range(count)]


def _check_like(grad: Pieces, residual: Tensor) -> None:
    """Kernels do not check: a state of another gradient would have them read past its end."""
    if grad.numel != residual.numel() or _wide(grad.dtype) != residual.dtype or grad.device != residual.device:
        raise InputError(
            f"the state belongs to another gradient: it has {residual.numel()} entries, {residual.dtype}, "
            f"{residual.device}; the gradient has {grad.numel} entries, {grad.dtype}, {grad.device}"
        )


def _add(
    residual: Tensor, grad: Pieces, out: Tensor, floor: float | None, expected: int, *, clear: bool
) -> Entries | None:
    """`out = residual + grad`, zero where a piece is withheld; with a floor also what is not below it, if not too many.

    What is collected depends on how the vector lies in pieces; what a selector picks does not (it is a hint only). With
    `clear` the gradient is zero afterwards.
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


def take_off_(accumulated: Tensor, sent: SparseVector, leftover: SparseVector) -> None:
    """What was sent goes, what is left over stays or comes back."""
    kept, *others = leftover.parts
    # What is left over may still have to be computed from what was sent, which may lie in `accumulated` itself.
    more = [other.entries for other in others if other.nnz]
    changed = kept.changed_of(sent)
    if changed is None:
        _replace_(accumulated, sent, kept)
    else:
        places, left = changed
        if left is None:
            kernels(accumulated).clear_(accumulated, places)
        else:
            kernels(accumulated).put_(accumulated, places, left)
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


def _delivered(local: SparseVector, leftover: SparseVector) -> SparseVector:
    """The entries of which less than half came back: a lossy code leaves a little over of what it delivers."""
    if leftover.nnz == 0 or local.nnz == 0:
        return local
    places = torch.searchsorted(local.indices, leftover.indices).clamp_(max=local.nnz - 1)
    sent = local.values[places].abs()
    came_back = (local.indices[places] == leftover.indices) & (2 * leftover.values.abs() >= sent)
    entries = leftover.indices[came_back], leftover.values[came_back]
    return local.without(SparseVector.trusted(entries, local.numel))


def _keep_withheld_(grad: Pieces, old: Tensor, new: Tensor) -> None:
    for start, stop, _, withheld in grad:
        if withheld:
            new[start:stop] = old[start:stop]
