"""Error feedback with momentum correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.feedback.accumulating import check_like, wide_zeros
from gradsieve.feedback.base import Accumulated, Feedback
from gradsieve.feedback.settling import keep_withheld_, take_off_
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


class MomentumState(NamedTuple):
    """Velocity and residual, and a spare vector for each."""

    velocity: Tensor
    residual: Tensor
    spare_velocity: Tensor
    spare: Tensor


@dataclass(frozen=True)
class MomentumResidual(Feedback[MomentumState]):
    """Momentum correction and factor masking, from Deep Gradient Compression.

    Lin et al., ICLR 2018, https://arxiv.org/abs/1712.01887. With velocity u and residual v:
    1. u = momentum * u + grad
    2. v += u, and entries of v are sent
    3. u and v are cleared at delivered entries
    It replaces the optimizer's momentum, so use it with an optimizer without momentum.
    """

    momentum: float = 0.9  # as an optimizer's; 0 is plain error feedback

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1), got {self.momentum}")

    @override
    def init(self, grad: Pieces) -> MomentumState:
        return MomentumState(*wide_zeros(grad, 4))

    @override
    def accumulate(
        self, grad: Pieces, out: Pieces, state: MomentumState, floor: float | None, expected: int
    ) -> Accumulated:
        check_like(grad, state.residual)
        for start, stop, values, _ in grad:
            torch.add(values, state.velocity[start:stop], alpha=self.momentum, out=state.spare_velocity[start:stop])
        torch.add(state.residual, state.spare_velocity, out=state.spare)
        for piece in grad:
            if piece.withheld:
                state.spare[piece.start : piece.stop] = 0
        return Accumulated(state.spare)

    @override
    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: MomentumState
    ) -> MomentumState:
        delivered = _delivered(local, leftover)  # first, since `local` may share the memory of `accumulated`
        take_off_(accumulated, local, leftover)
        take_off_(state.spare_velocity, delivered, SparseVector.empty(local.numel, accumulated))
        keep_withheld_(grad, state.residual, accumulated)
        keep_withheld_(grad, state.velocity, state.spare_velocity)
        return MomentumState(state.spare_velocity, accumulated, state.velocity, state.residual)

    @override
    def vectors(self, state: MomentumState) -> dict[str, Tensor]:
        return {"velocity": state.velocity, "residual": state.residual}

    @override
    def rescale_(self, state: MomentumState, factor: float) -> None:
        state.velocity.mul_(factor)
        state.residual.mul_(factor)


def _delivered(local: SparseVector, leftover: SparseVector) -> SparseVector:
    """Return the sent entries of which less than half is left over: a lossy code leaves rounding errors."""
    if leftover.nnz == 0 or local.nnz == 0:
        return local
    positions = torch.searchsorted(local.indices, leftover.indices).clamp_(max=local.nnz - 1)
    sent = local.values[positions].abs()
    undelivered = (local.indices[positions] == leftover.indices) & (2 * leftover.values.abs() >= sent)
    entries = leftover.indices[undelivered], leftover.values[undelivered]
    return local.without(SparseVector.trusted(entries, local.numel))
