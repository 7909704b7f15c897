"""Exchange of updates under DDP, on real processes: see `updates_checks` for what each name asserts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

import updates_checks
from gradsieve.lab.workers import Worker, run_workers

RANKS = 4
CHECKS = [
    "nothing_is_lost",
    "models_at_rest_are_equal",
    "evaluation_and_saving_see_the_shared_model",
    "sgd_learns_as_plain_ddp_does",
    "a_scaler_may_skip_on_one_rank",
    "accumulation_exchanges_once",
    "uneven_inputs_are_joined",
    "a_resumed_run_equals_the_uninterrupted_one",
    "another_size_keeps_the_mean_model",
    "a_model_that_is_not_finite_is_not_spread",
    "half_precision_parameters_keep_small_moves",
    "drift_of_the_shared_model_is_found",
    "diloco_averages_every_so_many_steps",
    "forgotten_residuals_are_the_third_term_of_the_law",
    "adam_on_sparse_gradients_is_warned_of_once",
    "rates_of_their_own_have_groups_of_their_own",
    "what_does_not_go_with_updates_is_refused",
]


def run_checks(worker: Worker, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        check: Callable[[int], None] = getattr(updates_checks, name)
        try:
            check(worker.rank)
        except BaseException as error:
            where = " < ".join(
                f"{frame.name}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))
            )
            raise AssertionError(f"{name}: {type(error).__name__}: {error} [{where}]") from error
        dist.barrier()


@pytest.mark.timeout(600)
def test_updates() -> None:
    run_workers(RANKS, run_checks, CHECKS)
