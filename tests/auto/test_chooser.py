"""The decision among ways to exchange, from times that the tests make up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

import pytest

from gradsieve.auto import Candidate, Chooser, Timing
from gradsieve.auto.chooser import PATIENCE_STEPS, SETTLING_STEPS, TIMED_STEPS, WATCHED_STEPS

SPARSE, DENSE = Candidate("oktopk"), Candidate("dense", True, 1e6)
TRIAL_STEPS = SETTLING_STEPS + TIMED_STEPS


class Run:
    """A run of one rank whose steps take given times."""

    def __init__(self, *candidates: Candidate, seconds_per_byte: float = 0.0) -> None:
        self.chooser = Chooser(candidates or (SPARSE, DENSE))
        self.seconds_per_byte = seconds_per_byte
        self.made: list[str] = []
        self.chooser.begin(seconds_per_byte)

    def steps(self, count: int, times: Mapping[str, Timing]) -> Run:
        for _ in range(count):
            name = self.chooser.candidates[self.chooser.current].name
            self.made.append(name)
            self.chooser.record(times[name])
            if self.chooser.is_due and self.chooser.compare([self.chooser.own()]):
                self.chooser.begin(self.seconds_per_byte)
        return self

    @property
    def chosen(self) -> str | None:
        return None if self.chooser.chosen is None else self.chooser.candidates[self.chooser.chosen].name


def taking(seconds: float, exposed: float = 0.0, sent: float = 1.0) -> Timing:
    return Timing(seconds, exposed, sent)


def test_each_candidate_makes_some_steps_and_the_fastest_stays() -> None:
    run = Run().steps(40, {"oktopk": taking(2.0), "dense": taking(1.0)})
    assert run.made == ["oktopk"] * TRIAL_STEPS + ["dense"] * (40 - TRIAL_STEPS)
    assert run.chosen == "dense"


def test_nothing_is_chosen_before_the_end_of_the_trial() -> None:
    run = Run().steps(2 * TRIAL_STEPS - 1, {"oktopk": taking(2.0), "dense": taking(1.0)})
    assert run.chosen is None
    assert run.chooser.decided() is None


def test_close_candidates_are_timed_again_in_turns() -> None:
    """One heat may fall into a moment in which the machine was busy."""
    run = Run().steps(5 * TRIAL_STEPS, {"oktopk": taking(1.2), "dense": taking(1.0)})
    assert run.chosen is None
    stretches = [run.made[start] for start in range(0, len(run.made), TRIAL_STEPS)]
    assert stretches == ["oktopk", "dense", "dense", "oktopk", "oktopk"]
    run.steps(TRIAL_STEPS, {"dense": taking(50.0)})
    assert run.chosen == "dense"


def test_the_first_steps_of_a_candidate_are_not_timed() -> None:
    chooser = Chooser((SPARSE, DENSE))
    chooser.begin(0.0)
    for number in range(TRIAL_STEPS):
        chooser.record(taking(100.0 if number < SETTLING_STEPS else 1.0))
    assert chooser.own().seconds == 1.0


def test_one_slow_step_does_not_decide() -> None:
    chooser = Chooser((SPARSE, DENSE))
    chooser.begin(0.0)
    for number in range(TRIAL_STEPS):
        chooser.record(taking(50.0 if number == SETTLING_STEPS + 1 else 1.0))
    assert chooser.own().seconds == 1.0


def test_a_candidate_whose_bytes_alone_take_too_long_is_not_tried() -> None:
    run = Run(seconds_per_byte=3e-6).steps(TRIAL_STEPS, {"oktopk": taking(2.0)})
    assert run.chosen == "oktopk"
    assert str(run.chooser.decided()) == (
        "oktopk (oktopk takes 2.00 s per step, dense was not tried: its bytes alone take 3.00 s)"
    )


def test_of_equal_times_fewer_bytes_win() -> None:
    times = {"oktopk": taking(1.02, 0.5, sent=10), "dense": taking(1.0, 0.5, sent=1000)}
    assert Run().steps(60, times).chosen == "oktopk"


def test_of_equal_times_a_hidden_dense_exchange_wins() -> None:
    times = {"oktopk": taking(1.0, 0.0, sent=10), "dense": taking(1.02, 0.01, sent=1000)}
    assert Run().steps(60, times).chosen == "dense"


def test_the_slowest_rank_counts() -> None:
    chooser = Chooser((SPARSE, DENSE))
    chooser.begin(0.0)
    chooser.compare([taking(1.0), taking(4.0)])
    chooser.compare([taking(2.0), taking(2.0)])
    assert chooser.candidates[chooser.current].name == "dense"


def test_ranks_without_times_do_not_count() -> None:
    chooser = Chooser((SPARSE, DENSE))
    chooser.begin(0.0)
    chooser.compare([chooser.own(), taking(4.0)])
    chooser.compare([chooser.own(), taking(2.0)])
    assert chooser.candidates[chooser.current].name == "dense"


def test_without_any_time_the_first_stays() -> None:
    chooser = Chooser((SPARSE, DENSE))
    chooser.begin(0.0)
    for _ in range(2 * TRIAL_STEPS):
        chooser.record(None)
        if chooser.is_due:
            chooser.compare([chooser.own()])
    assert (chooser.chosen, chooser.current) == (0, 0)


FAST = {"oktopk": taking(2.0, 1.0), "dense": taking(1.0, 0.5)}
SLOW = {"oktopk": taking(3.0, 2.0), "dense": taking(60.0, 59.5)}


def test_it_follows_a_network_that_becomes_slower_and_faster_again() -> None:
    run = Run().steps(60, FAST)
    assert run.chosen == "dense"
    run.steps(50, SLOW)
    assert (run.chosen, run.made[-1]) == ("oktopk", "oktopk")
    run.steps(50, FAST)
    assert (run.chosen, run.made[-1]) == ("dense", "dense")


def test_a_change_of_what_is_waited_for_is_seen_behind_long_computing() -> None:
    run = Run().steps(60, {"oktopk": taking(10.0, 2.5), "dense": taking(11.0, 4.0)})
    assert run.chosen == "oktopk"
    run.steps(100, {"oktopk": taking(8.0, 0.5), "dense": taking(7.0, 0.0)})
    assert run.chosen == "dense"


def test_a_network_that_breaks_down_at_the_end_of_a_trial_is_not_taken_for_the_usual() -> None:
    """It happened: the trial saw the fast network, the next comparison the slow one, and dense stayed for good."""
    run = Run().steps(2 * TRIAL_STEPS, FAST)
    assert run.chosen == "dense"
    run.steps(WATCHED_STEPS + 2 * TRIAL_STEPS, SLOW)
    assert run.chosen == "oktopk"


def test_a_network_that_became_fast_is_seen_by_a_glance() -> None:
    """A sparse step may take as long as before: it has nearly nothing to send."""
    run = Run(seconds_per_byte=1e-4).steps(TRIAL_STEPS, {"oktopk": taking(2.0)})
    run.steps(PATIENCE_STEPS + WATCHED_STEPS, {"oktopk": taking(2.0)})
    assert not run.chooser.glances(6e-5)  # not much faster
    assert not run.chooser.glances(3e-6)  # much faster, and its bytes alone would still take 3 s
    assert run.chooser.glances(1e-6)


def test_a_glance_soon_after_a_trial_says_nothing() -> None:
    run = Run(seconds_per_byte=1e-4).steps(TRIAL_STEPS + WATCHED_STEPS, {"oktopk": taking(2.0)})
    assert not run.chooser.glances(1e-6)


def test_small_changes_begin_no_trial() -> None:
    run = Run().steps(60, FAST)
    run.steps(200, {"oktopk": taking(0.9), "dense": taking(1.3, 0.5)})
    assert set(run.made[60:]) == {"dense"}


def test_a_small_advantage_changes_nothing_in_a_later_trial() -> None:
    run = Run().steps(60, FAST)
    run.steps(100, {"oktopk": taking(1.9, 1.0), "dense": taking(2.0, 1.5)})
    assert "oktopk" in run.made[60:]  # a trial
    assert run.chosen == "dense"


def test_trials_that_change_nothing_become_rarer() -> None:
    run = Run().steps(2 * TRIAL_STEPS, FAST)
    began = []
    for seconds in (1.0, 2.0) * 200:  # each comparison sees another time
        before = run.chooser.is_trying
        run.steps(WATCHED_STEPS if not before else TRIAL_STEPS, {"oktopk": taking(9.0), "dense": taking(seconds)})
        if run.chooser.is_trying and not before:
            began.append(len(run.made))
    distances = [later - earlier for earlier, later in pairwise(began)]
    assert distances[0] >= PATIENCE_STEPS
    assert distances[-1] > 2 * distances[0]


def test_an_impossible_candidate_is_never_tried_again() -> None:
    run = Run().steps(TRIAL_STEPS + 1, FAST)
    run.chooser.exclude(1)
    run.steps(300, FAST)
    assert run.chosen == "oktopk"
    assert "dense" not in run.made[TRIAL_STEPS + 1 :]


@pytest.mark.parametrize("steps", [3, TRIAL_STEPS, TRIAL_STEPS + 4, 2 * TRIAL_STEPS, 47, 93])
def test_a_state_continues_alike(steps: int) -> None:
    first = Run().steps(steps, FAST)
    second = Run()
    second.chooser.load(json.loads(json.dumps(first.chooser.state()), object_hook=numbers))
    times = {name: SLOW[name] for name in SLOW}
    assert first.steps(60, times).made[steps:] == second.steps(60, times).made


def numbers(found: dict[str, object]) -> dict[object, object]:
    """JSON has texts for keys."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def test_a_state_of_other_candidates_does_not_fit() -> None:
    chooser = Chooser((SPARSE, DENSE))
    assert chooser.fits(chooser.state())
    assert not chooser.fits(Chooser((Candidate("topka"), DENSE)).state())
