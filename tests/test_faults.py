"""Ranks that are killed while training under DDP: all others are told who, where and when; nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_faults import TIMEOUT_SECONDS, VICTIM, outcomes

# moment, ranks, recipe, groups and phases the others may be in (backward and exchange go on side by side)
KILLS = [
    ("between steps", 3, "oktopk", {0}, {"scatter"}),
    ("backward", 3, "topka", {0, 1, 2}, {"gather"}),
    ("before the exchange", 3, "oktopk", {0}, {"scatter"}),
    ("select", 3, "topkdsa", {1}, {"scatter"}),
    # The next rank has had what was sent to it, and hears of the loss a little later.
    ("scatter", 6, "oktopk", {0}, {"scatter", "agree", "gather"}),
    ("gather", 3, "topkdsa", {0, 1}, {"gather", "scatter"}),
    ("tree", 6, "gtopk", {0}, {"receive", "send", "pass down"}),
    ("all_reduce", 6, "oktopk", {3}, {"all_reduce"}),
]


@pytest.mark.parametrize(("moment", "ranks", "recipe", "groups", "phases"), KILLS, ids=[kill[0] for kill in KILLS])
def test_a_killed_rank_is_named_to_all_others(
    moment: str, ranks: int, recipe: str, groups: set[int], phases: set[str], tmp_path: Path
) -> None:
    told = outcomes(ranks, tmp_path, moment, recipe)
    assert set(told) == set(range(ranks)) - {VICTIM}
    for rank, heard in told.items():
        assert heard["peer"] == VICTIM, heard
        assert heard["phase"] in phases, heard
        assert heard["group"] in groups, heard
        assert heard["text"].startswith(f"rank {rank}: step 2, group {heard['group']} of 4, parameters ")
        assert f"lost rank {VICTIM} " in heard["text"]
        assert f"in phase {heard['phase']}" in heard["text"]
        assert heard["seconds"] < TIMEOUT_SECONDS
        assert heard["exit"] == 3
