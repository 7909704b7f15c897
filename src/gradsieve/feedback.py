"""Error feedback: what was not delivered is added to the next gradient.

Each form keeps a spare vector and writes the accumulated gradient there; the residual itself is untouched until the
step is settled, when the two change places. A step that fails or is abandoned leaves the residual as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.kernels import Entries, kernels
from gradsieve.vector import SparseVector

F = TypeVar("F")


class Feedback(Protocol[F]):
    """Accumulates gradients into what is selected from, and settles what becomes of it."""

    def init(self, grad: Tensor) -> F:
        """The state before the first step, for gradients like this one."""
        ...

    def accumulate(
        self, grad: Tensor, out: Tensor, state: F, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """The vector to select from; with a floor, also its entries that are not below it, about `expected`.

        `out` is where the result of the step will be written, and free to be used until then; it may be `grad` itself.
        """
        ...

    def settle(self, accumulated: Tensor, grad: Tensor, local: SparseVector, leftover: SparseVector, state: F) -> F:
        """The state after a step in which `local` was sent and `leftover` came back."""
        ...


class NothingKept(NamedTuple):
    """The state of no feedback."""


@dataclass(frozen=True)
class NoFeedback:
    """What is not delivered is lost: for dense exchange, where that is nothing, and to show why feedback matters."""

    def init(self, grad: Tensor) -> NothingKept:
        """See `Feedback.init`."""
        return NothingKept()

    def accumulate(
        self, grad: Tensor, out: Tensor, state: NothingKept, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        if grad.dtype != _wide(grad.dtype):
            return grad.to(_wide(grad.dtype)), None
        return grad if out is grad else out.copy_(grad), None

    def settle(
        self,
        accumulated: Tensor,
        grad: Tensor,
        local: SparseVector,
        leftover: SparseVector,
        state: NothingKept,
    ) -> NothingKept:
        """See `Feedback.settle`."""
        return state


class ResidualState(NamedTuple):
    """What was left over so far, and room for the next accumulation."""

    residual: Tensor
    spare: Tensor


@dataclass(frozen=True)
class Residual:
    """Plain error feedback: the residual is added to the gradient."""

    def init(self, grad: Tensor) -> ResidualState:
        """See `Feedback.init`."""
        return ResidualState(*_wide_zeros(grad, 2))

    def accumulate(
        self, grad: Tensor, out: Tensor, state: ResidualState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        _check_like(grad, state.residual)
        return state.spare, _add(state.residual, grad, state.spare, floor, expected)

    def settle(
        self,
        accumulated: Tensor,
        grad: Tensor,
        local: SparseVector,
        leftover: SparseVector,
        state: ResidualState,
    ) -> ResidualState:
        """See `Feedback.settle`."""
        kernels(accumulated).settle_(accumulated, local.entries, leftover.entries)
        return ResidualState(accumulated, state.residual)


class MomentumState(NamedTuple):
    """Velocity and residual, and room for the next accumulation."""

    velocity: Tensor
    residual: Tensor
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

    def init(self, grad: Tensor) -> MomentumState:
        """See `Feedback.init`."""
        return MomentumState(*_wide_zeros(grad, 3))

    def accumulate(
        self, grad: Tensor, out: Tensor, state: MomentumState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """See `Feedback.accumulate`."""
        _check_like(grad, state.residual)
        self._velocity(grad, state.velocity, out=state.spare)
        return state.spare.add_(state.residual), None

    def settle(
        self,
        accumulated: Tensor,
        grad: Tensor,
        local: SparseVector,
        leftover: SparseVector,
        state: MomentumState,
    ) -> MomentumState:
        """See `Feedback.settle`."""
        kernels(accumulated).settle_(accumulated, local.entries, leftover.entries)
        self._velocity(grad, state.velocity, out=state.velocity)
        none = SparseVector.empty(local.numel, accumulated)
        kernels(state.velocity).settle_(state.velocity, local.without(leftover).entries, none.entries)
        return MomentumState(state.velocity, accumulated, state.residual)

    def _velocity(self, grad: Tensor, velocity: Tensor, out: Tensor) -> None:
        torch.add(grad, velocity, alpha=self.momentum, out=out)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: small leftovers added to large ones in half precision would vanish."""
    return dtype if dtype == torch.float64 else torch.float32


def _wide_zeros(grad: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros_like(grad, dtype=_wide(grad.dtype)) for _ in range(count)]


def _check_like(grad: Tensor, residual: Tensor) -> None:
    """Kernels do not check: a state of another gradient would have them read past its end."""
    if grad.shape != residual.shape or _wide(grad.dtype) != residual.dtype or grad.device != residual.device:
        raise InputError(
            f"the state belongs to another gradient: it has {residual.numel()} entries, {residual.dtype}, "
            f"{residual.device}; the gradient has shape {tuple(grad.shape)}, {grad.dtype}, {grad.device}"
        )


def _add(residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int) -> Entries | None:
    if grad.dtype == out.dtype:
        return kernels(residual, grad, out).accumulate(residual, grad, out, floor, expected)
    torch.add(residual, grad, out=out)
    return None if floor is None else kernels(out).compact(out, floor, expected)
