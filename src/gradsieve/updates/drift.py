"""Error feedback for updates: the residual is the part of this rank's updates that was not delivered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsieve.feedback import Accumulated, Residual, ResidualState
from gradsieve.feedback.settling import take_off_
from gradsieve.kernels import kernels
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


@dataclass(frozen=True)
class Drift(Residual):
    """A residual that grows when the optimizer steps (`LocalModel.rest`), not when it is exchanged.

    With a decay below one the law has a third term: sent = delivered + kept + forgotten.
    """

    decay: float = 1.0  # fraction of the residual that is kept after an exchange; less forgets sooner

    def accumulate(
        self, grad: Pieces, out: Pieces, state: ResidualState, floor: float | None, expected: int
    ) -> Accumulated:
        """Copy the residual to the spare vector. The residual does not change until the step counts."""
        state.spare.copy_(state.residual)
        candidates = None if floor is None else kernels(state.spare).compact(state.spare, floor, expected)
        return Accumulated(state.spare, candidates)

    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: ResidualState
    ) -> ResidualState:
        """Subtract the delivered entries, and decay."""
        return ResidualState(self.left_of(accumulated, local, leftover), state.residual)

    def left_of(self, accumulated: Tensor, local: SparseVector, leftover: SparseVector) -> Tensor:
        """Turn a vector into its residual in place: without the delivered entries, and decayed."""
        take_off_(accumulated, local, leftover)
        return accumulated if self.decay == 1 else accumulated.mul_(self.decay)
