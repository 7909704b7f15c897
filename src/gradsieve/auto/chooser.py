"""Chooses the fastest of several candidates from the time that steps take: the same decision on all ranks.

1. Trial: each candidate makes some steps. One that could not win even if the network were all it waited for is left
   out. Candidates that are close to the fastest make some more, in turns.
2. Decision: the fastest. Where the difference is within the noise: a dense exchange that is hidden behind computing, or
   else the candidate that sends least.
3. Watch: the time of the chosen candidate is compared from time to time. If it has changed, a new trial begins, in
   which another candidate must show a clear advantage.

A chooser sees numbers only. Ranks that give it the same numbers choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradsieve.auto.timing import NOTHING, Timing, slowest, typical
from gradsieve.stats.figures import Decided

SETTLING_STEPS = 3  # of each candidate, not timed: thresholds are adapted until the third
TIMED_STEPS = 5
WATCHED_STEPS = 10  # between two comparisons of the ranks' times
HEATS = 3  # times that a candidate is timed in a trial, if it is close to the fastest
CLOSE = 1.5  # times the fastest
NOISE = 0.03  # relative differences of step times that mean nothing
ADVANTAGE = 0.10  # that another candidate must show before the decision changes; more changes it less often
CHANGE = 1.5  # factor between step times that begins a new trial; more does so less often
DRASTIC = 4.0  # times as slow as in the last trial: begins a new one at once
FASTER = 2.0  # times as fast as in the last trial: a network on which a candidate that sends more is tried again
HOPELESS = 1.2  # a candidate whose bytes alone take this many times the best step is left out
PATIENCE_STEPS = 20  # after a trial, before the next one; doubled by each trial that changes nothing
MOST_PATIENCE_STEPS = 160


class Candidate(NamedTuple):
    """One way to exchange."""

    name: str
    is_dense: bool = False
    least_bytes: float = 0.0  # that a rank sends in each step


class Chooser:
    """One decision among candidates, which are tried in their order. The one that sends least should be the first."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self.current = 0  # makes the next step
        self.chosen: int | None = None  # None before the end of the first trial
        self.is_trying = False
        self.measured: dict[int, Timing] = {}  # in the last trial
        self.left_out: dict[int, float] = {}  # in the last trial: the seconds that their bytes alone would take
        self.excluded: set[int] = set()
        self._heats: dict[int, list[Timing]] = {}  # in the last trial: what `measured` has the medians of
        self._waiting: list[int] = []  # to be tried
        self._floors: list[float] = []  # seconds that the bytes of each candidate take alone
        self._timings: list[Timing] = []
        self._steps = 0  # since the last comparison
        self._reference = NOTHING  # the chosen candidate's, when it was chosen
        self._patience, self._rest = PATIENCE_STEPS, 0  # steps: of rest after a trial, and left of it

    def begin(self, seconds_per_byte: float) -> None:
        """Begin a trial on a network that takes this long per byte."""
        self._floors = [seconds_per_byte * candidate.least_bytes for candidate in self.candidates]
        possible = [index for index in range(len(self.candidates)) if index not in self.excluded]
        self._waiting = sorted(possible, key=lambda index: index != self.chosen)  # the chosen one first
        self._heats, self.measured, self.left_out, self.is_trying = {}, {}, {}, True
        self._try_next()

    def exclude(self, index: int) -> None:
        """Leave a candidate out for good: it has turned out to be impossible. Another one is chosen by a new trial."""
        self.excluded.add(index)
        self.begin(0.0)

    def record(self, timing: Timing | None) -> None:
        """Count a step of the current candidate. None: this rank has no time of it."""
        self._steps += 1
        self._rest = max(0, self._rest - 1)
        if timing is not None and (self._steps > SETTLING_STEPS or not self.is_trying):
            self._timings.append(timing)

    @property
    def is_due(self) -> bool:
        """Whether the ranks must compare their times now; the same on all ranks, since they count the same steps."""
        return self._steps >= (SETTLING_STEPS + TIMED_STEPS if self.is_trying else WATCHED_STEPS)

    def own(self) -> Timing:
        """Return what this rank has measured since the last comparison."""
        return typical(self._timings)

    def compare(self, timings: Sequence[Timing]) -> bool:
        """Use the times of all ranks. Returns whether a new trial must begin."""
        measured = slowest(timings)
        self._steps, self._timings = 0, []
        if self.is_trying:
            self._heats.setdefault(self.current, []).append(measured)
            self.measured[self.current] = typical([timing for timing in self._heats[self.current] if timing.is_known])
            if not self._waiting:
                self._waiting = self._next_heat()
            self._try_next()
            return False
        if not self._reference.is_known:
            self._reference = measured
        if measured.seconds > DRASTIC * self._reference.seconds:
            return True
        return self._rest == 0 and _has_changed(measured, self._reference)

    def _try_next(self) -> None:
        self._steps, self._timings = 0, []
        best = min((timing.seconds for timing in self.measured.values() if timing.is_known), default=None)
        while self._waiting:
            candidate = self._waiting.pop(0)
            if best is None or self._floors[candidate] <= HOPELESS * best:
                self.current = candidate
                return
            self.left_out[candidate] = self._floors[candidate]
        self._choose()

    def glances(self, seconds_per_byte: float) -> bool:
        """Use a glance at the network. Returns whether a new trial must begin: bytes may have become cheap."""
        if self.is_trying or self._rest or not self._reference.is_known:
            return False
        for index, candidate in enumerate(self.candidates):
            floor = seconds_per_byte * candidate.least_bytes
            could_win = index != self.chosen and index not in self.excluded
            if could_win and floor * FASTER < self._floors[index] and floor <= HOPELESS * self._reference.seconds:
                return True
        return False

    @property
    def sends_less(self) -> bool:
        """Whether the chosen candidate would lose against another one on a fast network, without becoming slower."""
        return self.chosen is not None and not self.is_trying and not self.candidates[self.chosen].is_dense

    def _next_heat(self) -> list[int]:
        """Return the candidates to be timed again: those close to the fastest, beginning with the current one."""
        known = {index: timing.seconds for index, timing in self.measured.items() if timing.is_known}
        limit = CLOSE if self.chosen is None else 1 + ADVANTAGE  # a later trial is to be short: the network has changed
        close = [index for index, seconds in known.items() if seconds <= limit * min(known.values(), default=0.0)]
        if len(close) < 2 or any(len(self._heats[index]) >= HEATS for index in close):
            return []
        return sorted(close, key=lambda index: (index != self.current, index))

    def _choose(self) -> None:
        before, self.is_trying = self.chosen, False
        self.chosen = self.current = self._winner(before)
        self._reference = self.measured.get(self.chosen, NOTHING)
        self._patience = PATIENCE_STEPS if before != self.chosen else min(2 * self._patience, MOST_PATIENCE_STEPS)
        self._rest = self._patience

    def _winner(self, before: int | None) -> int:
        known = {index: timing for index, timing in self.measured.items() if timing.is_known}
        if not known:
            return 0 if before is None else before
        best = min(timing.seconds for timing in known.values())
        if before in known and known[before].seconds <= best * (1 + ADVANTAGE):
            return before
        equal = [index for index, timing in known.items() if timing.seconds <= best * (1 + NOISE)]
        hidden = [i for i in equal if self.candidates[i].is_dense and known[i].exposed_seconds <= NOISE * best]
        return min(hidden or equal, key=lambda index: (known[index].bytes_sent, index))

    def decided(self) -> Decided | None:
        """Return the decision and its reasons; None before the end of the first trial."""
        if self.chosen is None:
            return None
        names = [candidate.name for candidate in self.candidates]
        seconds = {names[index]: timing.seconds for index, timing in sorted(self.measured.items())}
        return Decided(names[self.chosen], seconds, {names[index]: s for index, s in sorted(self.left_out.items())})

    def state(self) -> dict[str, Any]:
        """Return the decision, to be continued by `load`."""
        return {
            "candidates": [candidate.name for candidate in self.candidates],
            "current": self.current,
            "chosen": self.chosen,
            "is_trying": self.is_trying,
            "measured": {index: tuple(timing) for index, timing in self.measured.items()},
            "heats": {index: [tuple(timing) for timing in timings] for index, timings in self._heats.items()},
            "left_out": dict(self.left_out),
            "excluded": sorted(self.excluded),
            "waiting": list(self._waiting),
            "floors": list(self._floors),
            "steps": self._steps,
            "timings": [tuple(timing) for timing in self._timings],
            "reference": tuple(self._reference),
            "patience": (self._patience, self._rest),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is that of a chooser with the same candidates."""
        return bool(state["candidates"] == [candidate.name for candidate in self.candidates])

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a chooser with the same candidates."""
        self.current, self.chosen, self.is_trying = state["current"], state["chosen"], state["is_trying"]
        self.measured = {index: Timing(*figures) for index, figures in state["measured"].items()}
        self._heats = {index: [Timing(*each) for each in timings] for index, timings in state["heats"].items()}
        self.left_out, self._waiting = dict(state["left_out"]), list(state["waiting"])
        self.excluded = set(state["excluded"])
        self._floors, self._steps = list(state["floors"]), state["steps"]
        self._timings = [Timing(*figures) for figures in state["timings"]]
        self._reference = Timing(*state["reference"])
        self._patience, self._rest = state["patience"]


def _has_changed(now: Timing, before: Timing) -> bool:
    """Whether steps, or a part of them that matters, take another time. False if either was not measured."""
    matters = max(now.exposed_seconds, before.exposed_seconds) > ADVANTAGE * now.seconds
    return _differ(now.seconds, before.seconds) or (matters and _differ(now.exposed_seconds, before.exposed_seconds))


def _differ(seconds: float, before: float) -> bool:
    return seconds > CHANGE * before or seconds * CHANGE < before
