"""What a decision measures of each step, on one rank's clock."""

from __future__ import annotations

import torch

from gradsieve.auto import Candidate, Decision, Timing
from gradsieve.comm import Comm, CountingComm
from gradsieve.stats import Stats
from gradsieve.testing import run_ranks

CANDIDATES = (Candidate("oktopk"), Candidate("dense", True, 4096))


def recorded(comm: Comm) -> list[Timing | None]:
    """The times of a whole step, of one that was skipped before its end, and of one that waited all the time."""
    counting = CountingComm(comm)
    decision = Decision(CANDIDATES, counting, torch.device("cpu"), Stats())
    seen: list[Timing | None] = []
    decision.chooser.record = seen.append  # type: ignore[method-assign]
    decision.begin_step()
    counting.all_reduce(torch.zeros(8))
    decision.end_step()
    decision.record()
    decision.begin_step()
    decision.record()
    decision.begin_step()
    decision.end_exposed_step()
    decision.record()
    return seen


def test_a_step_without_an_end_has_no_time() -> None:
    """A rank whose scaler skips a step must not give the time of the step before for it."""
    for whole, skipped, exposed in run_ranks(2, recorded):
        assert whole is not None
        assert whole.seconds > 0
        assert whole.bytes_sent == 32
        assert skipped is None
        assert exposed is not None
        assert exposed.exposed_seconds == exposed.seconds


def test_measuring_the_network_is_not_counted_as_traffic() -> None:
    def sent(comm: Comm) -> int:
        counting = CountingComm(comm)
        Decision(CANDIDATES, counting, torch.device("cpu"), Stats())
        return counting.traffic.bytes_sent

    assert run_ranks(2, sent) == [0, 0]
