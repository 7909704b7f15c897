"""The data path: accumulate, select, reduce, settle, write back. The whole product is this path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.recipes import Recipe
from gradsieve.vector import SparseVector


class PipelineState(NamedTuple):
    """What one group of gradients remembers between steps."""

    feedback: Any
    selector: Any
    reducer: Any


class Pipeline:
    """One recipe at work on one flat group of gradients, on one rank of a comm."""

    def __init__(self, recipe: Recipe, comm: Comm) -> None:
        self.recipe = recipe
        self.comm = comm

    def init(self, grad: Tensor) -> PipelineState:
        """The state before the first step, for gradients like this one; all ranks call it together."""
        recipe, numel = self.recipe, grad.numel()
        return PipelineState(
            recipe.feedback.init(grad), recipe.selector.init(numel), recipe.reducer.init(numel, self.comm)
        )

    def step(self, grad: Tensor, k: int, state: PipelineState, out: Tensor) -> PipelineState:
        """Write the mean over all ranks of what was delivered to `out`, which may be `grad` itself.

        If anything that was delivered is not finite, it is so on every rank: `out` is too, and the state that comes
        back is the one that went in, as if the step had not been.
        """
        feedback, select, reduce = self.recipe.feedback, self.recipe.selector, self.recipe.reducer
        floor = select.floor(state.selector)
        accumulated, candidates = feedback.accumulate(grad, out, state.feedback, floor, k)
        local, selector_state = select(accumulated, k, state.selector, candidates)
        (total, leftover), reducer_state = reduce(local, k, state.reducer, self.comm)
        if _finite(total):
            settled = feedback.settle(accumulated, grad, local, leftover, state.feedback)
            state = PipelineState(settled, selector_state, reducer_state)
        write_mean_(out, total, self.comm.size)
        return state


def write_mean_(out: Tensor, total: SparseVector, size: int) -> None:
    """The one place where a sum becomes a mean."""
    if total.is_full:
        torch.div(total.values, size, out=out)
    else:
        SparseVector.trusted((total.indices, total.values / size), total.numel).write_to_(out)


def _finite(total: SparseVector) -> bool:
    """Whether a step counts. A dense exchange has no state that could be spoiled, so it is not searched."""
    # The sum of finite values may overflow: only then is every value looked at.
    values = total.values
    return total.is_full or bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
