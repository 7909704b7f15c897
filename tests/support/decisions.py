"""Made-up times for `recipe="auto"`, so that a test gets the decision that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsieve.auto import Timing
from gradsieve.sieve import Sieve

DENSE_WINS = {"dense": 1.0, "onebit": 2.0, "oktopk": 2.0, "topka": 3.0}  # clearly: one heat decides
DENSE_LOSES = {"dense": 50.0, "onebit": 3.0, "oktopk": 2.0, "topka": 4.0}


def scripted(sieve: Sieve, seconds: Mapping[str, float]) -> dict[str, float]:
    """Let the ranks compare these times instead of what they measure. Returns the times, which may be changed."""
    assert sieve.engine.decision is not None
    chooser, times = sieve.engine.decision.chooser, dict(seconds)
    compare = chooser.compare

    def compare_made_up(timings: Any) -> bool:
        name = chooser.candidates[chooser.current].name
        return compare([Timing(times[name], 0.0, 1.0)])

    chooser.compare = compare_made_up  # type: ignore[method-assign]
    chooser._floors = [0.0] * len(chooser.candidates)  # whatever this machine's network takes: all are tried
    return times


def chosen(sieve: Sieve) -> str | None:
    assert sieve.engine.decision is not None
    chooser = sieve.engine.decision.chooser
    return None if chooser.chosen is None else chooser.candidates[chooser.chosen].name
