"""The data path of one exchange: accumulate, select, reduce, write back, settle."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.vector.pieces import Pieces


class State(Protocol):
    """The state of one part: a named tuple, printable, comparable, saved field by field."""

    def _asdict(self) -> dict[str, Any]: ...

    def _replace(self, **changes: Any) -> Any: ...


class PipelineState(NamedTuple):
    """The state of one group between steps."""

    feedback: State
    selector: State
    reducer: State


class Exchanged(NamedTuple):
    """The outcome of one exchange of one group."""

    state: PipelineState  # the new state, to be used if the step counts
    finite: bool  # whether all delivered entries are finite; the same on every rank
    num_local: int  # entries that this rank selected
    num_total: int  # entries that were delivered


class Pipeline:
    """Exchanges flat vectors by one recipe, on one rank of a comm."""

    def __init__(self, recipe: Recipe, comm: Comm) -> None:
        self.recipe = recipe
        self.comm = comm

    def init(self, grad: Pieces) -> PipelineState:
        """Return the state before the first step, for gradients like `grad`. All ranks call it together."""
        recipe, numel = self.recipe, grad.numel
        return PipelineState(
            recipe.feedback.init(grad), recipe.selector.init(numel), recipe.reducer.init(numel, self.comm)
        )

    def exchange(self, grad: Pieces, k: int, state: PipelineState, out: Pieces) -> Exchanged:
        """Write the mean of the delivered entries over all ranks to `out`, which may have the memory of `grad`.

        `state` stays valid until the returned state is used for another step. So a caller can decide later, for
        several groups together, whether the step counts.
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
        """Exchange one vector by itself and return its next state.

        If a delivered entry is not finite, every rank sees that: `out` is not finite either, and `state` is returned
        unchanged.
        """
        exchanged = self.exchange(Pieces([grad]), k, state, Pieces([out]))
        return exchanged.state if exchanged.finite else state


def entries_to_keep(numel: int, density: float, comm: Comm) -> int:
    """Return k for a density, at least one."""
    if not 0 < density <= 1:
        raise InputError(f"rank {comm.rank}: density must be in (0, 1], got {density}")
    return max(1, round(numel * density))
