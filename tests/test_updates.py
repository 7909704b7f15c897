"""Exchange of updates under DDP, on real processes: see `updates_checks` for what each name asserts."""

from __future__ import annotations

import pytest

import updates_checks
from ddp_checks import run_checks
from gradsieve.lab.rank_processes import run_rank_processes

RANKS = 4
CHECKS = [
    "nothing_is_lost",
    "models_at_rest_are_equal",
    "evaluation_and_saving_see_the_shared_model",
    "sgd_learns_as_plain_ddp_does",
    "adamw_on_exchanged_gradients_is_torchs",
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
    "sparseloco_as_published_learns",
    "adam_on_sparse_gradients_is_warned_of_once",
    "rates_of_their_own_have_groups_of_their_own",
    "what_does_not_go_with_updates_is_refused",
]


@pytest.mark.timeout(600)
def test_updates() -> None:
    run_rank_processes(RANKS, run_checks, CHECKS, updates_checks.__name__)
