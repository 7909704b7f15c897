"""Plain error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from gradsieve.feedback.accumulating import add, check_like, wide_zeros
from gradsieve.feedback.base import Accumulated, Feedback
from gradsieve.feedback.settling import keep_withheld_, take_off_
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


class ResidualState(NamedTuple):
    """The residual, and a spare vector for the next one."""

    residual: Tensor
    spare: Tensor


@dataclass(frozen=True)
class Residual(Feedback[ResidualState]):
    """Plain error feedback: the residual is added to the gradient."""

    @override
    def init(self, grad: Pieces) -> ResidualState:
        return ResidualState(*wide_zeros(grad, 2))

    @override
    def accumulate(
        self, grad: Pieces, out: Pieces, state: ResidualState, floor: float | None, expected: int
    ) -> Accumulated:
        check_like(grad, state.residual)
        clear = out.has_memory_of(grad)
        candidates = add(state.residual, grad, state.spare, floor, expected, clear=clear)
        return Accumulated(state.spare, candidates, out_is_clear=clear)

    @override
    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: ResidualState
    ) -> ResidualState:
        take_off_(accumulated, local, leftover)
        keep_withheld_(grad, state.residual, accumulated)
        return ResidualState(accumulated, state.residual)

    @override
    def vectors(self, state: ResidualState) -> dict[str, Tensor]:
        return {"residual": state.residual}

    @override
    def rescale_(self, state: ResidualState, factor: float) -> None:
        state.residual.mul_(factor)
