"""Ranks that are killed while training under DDP: all others are told who, where and when; nobody hangs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ddp_faults import TIMEOUT_SECONDS, Job, outcomes

# and the groups and phases the others may be in (backward and exchange go on side by side)
KILLS = [
    (Job("between steps", 3, "oktopk"), {0}, {"scatter"}),
    (Job("backward", 3, "topka"), {0, 1, 2}, {"gather"}),
    (Job("before the exchange", 3, "oktopk"), {0}, {"scatter"}),
    (Job("select", 3, "topkdsa"), {1}, {"scatter"}),
    # The next rank has had what was sent to it, and hears of the loss a little later.
    (Job("scatter", 6, "oktopk"), {0}, {"scatter", "agree", "gather"}),
    (Job("gather", 3, "topkdsa"), {0, 1}, {"gather", "scatter"}),
    (Job("tree", 6, "gtopk"), {0}, {"receive", "send", "pass down"}),
    (Job("all_reduce", 6, "oktopk"), {3}, {"all_reduce"}),
]


def check_told(heard: dict[str, Any], rank: int, groups: set[int], phases: set[str]) -> None:
    assert heard["phase"] in phases, heard
    assert heard["group"] in groups, heard
    assert heard["text"].startswith(f"rank {rank}: step 2, group {heard['group']} of 4, parameters ")
    assert f"in phase {heard['phase']}" in heard["text"]
    assert heard["seconds"] < TIMEOUT_SECONDS
    assert heard["exit"] == 3


@pytest.mark.parametrize(("job", "groups", "phases"), KILLS, ids=[kill[0].moment for kill in KILLS])
def test_a_killed_rank_is_named_to_all_others(job: Job, groups: set[int], phases: set[str], tmp_path: Path) -> None:
    told = outcomes(job, tmp_path)
    assert set(told) == set(range(job.size)) - {job.victim}
    for rank, heard in told.items():
        check_told(heard, rank, groups, phases)
        assert heard["peer"] == job.victim, heard
        assert f"lost rank {job.victim} " in heard["text"]


@pytest.mark.parametrize(
    ("job", "groups", "phases"),
    [
        (Job("scatter", 4, "oktopk", victim=0), {0}, {"scatter", "agree", "gather"}),
        (Job("tree", 6, "gtopk", victim=0), {0}, {"receive", "send", "pass down"}),
    ],
    ids=["scatter", "tree"],
)
def test_rank_0_takes_the_store_with_it_and_is_named_all_the_same(
    job: Job, groups: set[int], phases: set[str], tmp_path: Path
) -> None:
    """Without a store to ask, whoever fails because the first one to notice has ended names both of them."""
    told = outcomes(job, tmp_path)
    assert set(told) == set(range(1, job.size))
    for rank, heard in told.items():
        check_told(heard, rank, groups, phases)
        assert re.search(r"lost ranks? 0[ ,]", heard["text"]), heard
    assert any(heard["peer"] == 0 for heard in told.values())
