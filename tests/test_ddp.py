"""DDP in two lines, on real processes: see `ddp_checks` for what each name asserts."""

from __future__ import annotations

import pytest

from ddp_checks import run_checks
from gradsieve.lab.rank_processes import run_rank_processes

RANKS = 4

# A job's start costs more than its checks: so a few jobs, many checks each.
JOBS = {
    "equal to dense": [
        "density_one_is_dense_ddp",
        "density_one_is_dense_ddp_bit_for_bit_on_whole_numbers",
        "replicas_stay_equal",
        "drift_is_found",
        "replicas_that_are_equal_raise_no_alarm",
        "layouts_give_the_same_bits",
        "mixed_dtypes",
        "bfloat16_models",
        "resumed_equals_uninterrupted",
    ],
    "what training runs do": [
        "nan_skips_everywhere",
        "grad_scaler",
        "no_sync_accumulates",
        "uneven_inputs_with_join",
        "join_with_a_scaler_keeps_what_it_cannot_scale",
        "unused_parameters_lose_nothing",
        "dense_for_a_while",
        "schedules_and_rules",
        "clipping",
        "odd_models",
        "exchange_overlaps_backward",
        "groups_known_to_some_ranks_only",
        "subgroups_and_two_models",
    ],
    "what is refused": [
        "distributed_checkpoint_keeps_every_rank",
        "states_that_do_not_fit_are_refused",
        "handshake_names_who_differs",
        "what_cannot_be_attached_is_refused",
        "a_hook_that_never_runs_is_noticed",
        "errors_surface_with_their_type_and_place",
        "errors_of_any_kind_reach_the_next_wait",
    ],
}


@pytest.mark.parametrize("job", JOBS)
def test_ddp(job: str) -> None:
    run_rank_processes(RANKS, run_checks, JOBS[job])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_steps_leave_all_replicas_equal() -> None:
    run_rank_processes(RANKS, run_checks, ["replicas_stay_equal_for_long"])
