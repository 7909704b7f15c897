"""`Sieve.adapt` and `Sieve.clip_grad_norm_` on two processes: see `adapt_checks` for what each name asserts."""

from __future__ import annotations

import pytest

import adapt_checks
from ddp_checks import run_checks
from gradsieve.lab.rank_processes import run_rank_processes

CHECKS = [
    "momentum_sgd_is_linear",
    "dense_gradients_train_it_as_torchs",
    "a_live_optimizer_is_adapted",
    "a_wrapped_optimizer_is_adapted_inside",
    "what_cannot_be_adapted_is_said",
    "own_gradients_are_clipped_at_the_root_of_ranks",
    "mean_gradients_are_clipped_as_torch_does",
    "gradients_that_are_not_finite_are_left_to_torch",
]


@pytest.mark.timeout(600)
def test_adapt() -> None:
    run_rank_processes(2, run_checks, CHECKS, adapt_checks.__name__)
