"""The data path: accumulate, select, reduce, settle, write back. The whole product is this path."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.vector.pieces import Pieces


class State(Protocol):
    """A named tuple: printable, comparable, saved field by field."""

    def _asdict(self) -> dict[str, Any]: ...

    def _replace(self, **changes: Any) -> Any: ...


class PipelineState(NamedTuple):
    """What one group of gradients remembers between steps."""

    feedback: State
    selector: State
    reducer: State


class Exchanged(NamedTuple):
    """What became of one step of one group."""

    state: PipelineState  # to go on from, if the step counts
    finite: bool  # whether everything delivered is finite; the same on every rank
    num_local: int  # entries this rank picked
    num_total: int  # entries that were delivered


class Pipeline:
    """One recipe at work on one flat group of gradients, on one rank of a comm."""

    def __init__(self, recipe: Recipe, comm: Comm) -> None:
        self.recipe = recipe
        self.comm = comm

    def init(self, grad: Pieces) -> PipelineState:
        """The state before the first step, for gradients like this one; all ranks call it together."""
        recipe, numel = self.recipe, grad.numel
        return PipelineState(
            recipe.feedback.init(grad), recipe.selector.init(numel), recipe.reducer.init(numel, self.comm)
        )

    def exchange(self, grad: Pieces, k: int, state: PipelineState, out: Pieces) -> Exchanged:
        """Write the mean over all ranks of what was delivered to `out`, which may be `grad` itself.

        The state that went in stays whole until the one that comes out is used for another step: so a caller may
        decide later, for several groups together, whether this step has been.
        """
        feedback, select, reduce = self.recipe.feedback, self.recipe.selector, self.recipe.reducer
        accumulated = feedback.accumulate(grad, out, state.feedback, select.floor(state.selector), k)
        local, selector_state = select(accumulated.vector, k, state.selector, accumulated.candidates)
        (total, leftover), reducer_state = reduce(local, k, state.reducer, self.comm)
        finite = total.all_finite()
        out.write_mean_(total, self.comm.size, is_clear=accumulated.out_is_clear)
        settled = feedback.settle(accumulated.vector, grad, local, leftover, state.feedback)
        return Exchanged(PipelineState(settled, selector_state, reducer_state), finite, local.nnz, total.nnz)

    def step(self, grad: Tensor, k: int, state: PipelineState, out: Tensor) -> PipelineState:
        """One step of a vector that stands alone.

        If anything that was delivered is not finite, it is so on every rank: `out` is too, and the state that comes
        back is the one that went in, as if the step had not been.
        """
        pieces = Pieces([grad])
        exchanged = self.exchange(pieces, k, state, pieces if out is grad else Pieces([out]))
        return exchanged.state if exchanged.finite else state


def entries_to_keep(numel: int, density: float, comm: Comm) -> int:
    """k for a density: at least one."""
    if not 0 < density <= 1:
        raise InputError(f"rank {comm.rank}: density must be in (0, 1], got {density}")
    return max(1, round(numel * density))
