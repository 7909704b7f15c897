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
    """Velocity and residual, and room for the next of each."""

    velocity: Tensor
    residual: Tensor
    spare_velocity: Tensor
    spare: Tensor


@dataclass(frozen=True)
class MomentumResidual(Feedback[MomentumState]):
    """Momentum correction and factor masking, from Deep Gradient Compression (Lin et al., ICLR 2018).

    u = momentum * u + grad; v += u; entries of v are sent; u and v are cleared where they were delivered. It takes the
    place of the optimizer's momentum, whose buffer it uses instead: give it to an optimizer without momentum.
    """

    momentum: float = 0.9  # as the optimizer's; 0 is plain error feedback

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
        delivered = _delivered(local, leftover)  # before: a full vector that is sent lies in `accumulated` itself
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
    """The entries of which less than half came back: a lossy code leaves a little over of what it delivers."""
    if leftover.nnz == 0 or local.nnz == 0:
        return local
    positions = torch.searchsorted(local.indices, leftover.indices).clamp_(max=local.nnz - 1)
    sent = local.values[positions].abs()
    came_back = (local.indices[positions] == leftover.indices) & (2 * leftover.values.abs() >= sent)
    entries = leftover.indices[came_back], leftover.values[came_back]
    return local.without(SparseVector.trusted(entries, local.numel))
