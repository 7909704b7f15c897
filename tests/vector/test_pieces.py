"""Pieces: one vector in several tensors, and whether two of them have the same memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.feedback import Feedback, MomentumResidual, NoFeedback, Residual
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import recipe
from gradsieve.testing import run_ranks
from gradsieve.vector.pieces import Pieces


def test_same_memory_is_found_whatever_objects_describe_it() -> None:
    flat = torch.arange(12.0)
    halves = Pieces([flat[:6], flat[6:]])
    assert halves.whole is not None  # pieces that follow each other are joined
    assert Pieces([flat.view(12)]).has_memory_of(halves)
    assert Pieces([flat[:4], flat[8:]]).has_memory_of(Pieces([flat[:4], flat[8:]]))


def test_other_memory_is_not_taken_for_the_same() -> None:
    flat = torch.arange(12.0)
    assert not Pieces([flat.clone()]).has_memory_of(Pieces([flat]))
    assert not Pieces([flat[:6]]).has_memory_of(Pieces([flat]))
    assert not Pieces([flat[:4], flat[8:]]).has_memory_of(Pieces([flat[8:], flat[:4]]))


FEEDBACKS: list[Feedback[Any]] = [Residual(), MomentumResidual(0.9), NoFeedback()]


def exchange(grad: Tensor, out: Tensor, feedback: Feedback[Any]) -> None:
    def rank(comm: Comm) -> None:
        pipeline = Pipeline(replace(recipe("topka"), feedback=feedback), comm)
        pipeline.step(grad, 3, pipeline.init(Pieces([grad])), out)

    run_ranks(1, rank)


@pytest.mark.parametrize("feedback", FEEDBACKS, ids=str)
def test_a_view_of_the_gradient_as_output_is_as_good_as_the_gradient(feedback: Feedback[Any]) -> None:
    grad = torch.tensor([1.0, -9.0, 2.0, 8.0, -3.0, 7.0])
    mean = torch.empty(6)
    exchange(grad.clone(), mean, feedback)
    exchange(grad, grad.view(6), feedback)
    assert torch.equal(grad, mean)
    assert mean.count_nonzero() == 3


@pytest.mark.parametrize("feedback", FEEDBACKS, ids=str)
def test_with_another_output_the_gradient_stays_as_it_is(feedback: Feedback[Any]) -> None:
    grad = torch.tensor([1.0, -9.0, 2.0, 8.0, -3.0, 7.0])
    before = grad.clone()
    exchange(grad, torch.empty(6), feedback)
    assert torch.equal(grad, before)
