"""The public laws: every algorithm of the library passes them, and each kind of broken one is caught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from gradsieve import REDUCERS, SELECTORS, Comm, Reduced, SparseVector
from gradsieve.feedback import MomentumResidual, NoFeedback, Residual, ResidualState
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState
from gradsieve.reducers.topka import TopkA
from gradsieve.selectors.exact import Exact
from gradsieve.testing import LawError, check_feedback, check_reducer, check_selector
from gradsieve.vector.pieces import Pieces


@pytest.mark.parametrize("name", REDUCERS)
def test_reducers_keep_the_laws(name: str) -> None:
    check_reducer(REDUCERS[name], sizes=[1, 3], patterns=["overlapping", "everything", "ties"])


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_keep_their_promises(name: str) -> None:
    check_selector(SELECTORS[name])


@pytest.mark.parametrize("feedback", [Residual, MomentumResidual])
def test_feedback_keeps_its_law(feedback: Any) -> None:
    check_feedback(feedback)


@dataclass(frozen=True)
class Losing(TopkA):
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        (total, leftover), state = super().reduce(local.top(max(1, k // 2))[0], k, state, comm)
        return Reduced(total, leftover), state


@dataclass(frozen=True)
class Differing(TopkA):
    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        (total, leftover), state = super().reduce(local, k, state, comm)
        shifted = SparseVector(total.indices, total.values + comm.rank, total.numel)
        return Reduced(shifted, leftover), state


@dataclass(frozen=True)
class Cheap(TopkA):
    def cost(self, size: int, k: int, numel: int) -> Cost:
        return Cost(size - 1, 0, 0)


@pytest.mark.parametrize(
    ("reducer", "says"),
    [
        (Losing, "3 ranks, pattern 'overlapping': nothing may be lost, and at index"),
        (Differing, "total must be the same on all ranks, and rank 1 differs"),
        (Cheap, "bytes, cost.. allows"),
    ],
)
def test_a_broken_reducer_is_caught(reducer: Any, says: str) -> None:
    with pytest.raises(LawError, match=says):
        check_reducer(reducer, sizes=[3], patterns=["overlapping"])


@dataclass(frozen=True)
class Rounding(Exact):
    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Any) -> tuple[SparseVector, Any]:
        local, state = super().select(accumulated, k, state, candidates)
        return SparseVector(local.indices, local.values.round(), local.numel), state


@dataclass(frozen=True)
class BlindToNan(Exact):
    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Any) -> tuple[SparseVector, Any]:
        return super().select(accumulated.nan_to_num(0.0, 0.0, 0.0), k, state, None)


@pytest.mark.parametrize(
    ("selector", "says"), [(Rounding, "must be entries of the vector"), (BlindToNan, "an entry is nan")]
)
def test_a_broken_selector_is_caught(selector: Any, says: str) -> None:
    with pytest.raises(LawError, match=says):
        check_selector(selector)


class Forgetful(Residual):
    def settle(self, *arguments: Any) -> ResidualState:
        state = super().settle(*arguments)
        return ResidualState(state.residual * 0.5, state.spare)


class InPlace(Residual):
    def accumulate(self, grad: Pieces, out: Pieces, state: ResidualState, floor: Any, expected: int) -> Any:
        accumulated = super().accumulate(grad, out, state, floor, expected)
        state.residual.copy_(accumulated.vector)
        return accumulated


@pytest.mark.parametrize(
    ("feedback", "says"),
    [
        (Forgetful, "must be the accumulated minus the delivered entries"),
        (InPlace, "must not change the state before it"),
        (NoFeedback, "must have a 'residual'"),
    ],
)
def test_broken_feedback_is_caught(feedback: Any, says: str) -> None:
    with pytest.raises(LawError, match=says):
        check_feedback(feedback)
