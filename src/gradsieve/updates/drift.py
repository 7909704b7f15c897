"""Error feedback for updates: the residual is how far the local model is ahead of the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsieve.feedback import Residual, ResidualState
from gradsieve.kernels import Entries, kernels
from gradsieve.pieces import Pieces


@dataclass(frozen=True)
class Drift(Residual):
    """A residual that grows when the optimizer steps (`LocalModel.rest`), not when it is exchanged."""

    def accumulate(
        self, grad: Pieces, out: Pieces, state: ResidualState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """Copy the residual to the spare: nothing is added, and the residual stays whole until the step counts."""
        state.spare.copy_(state.residual)
        return state.spare, None if floor is None else kernels(state.spare).compact(state.spare, floor, expected)
