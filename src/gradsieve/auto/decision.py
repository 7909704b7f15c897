"""One model's decision: measures its steps, compares them with the other ranks' and tells what was chosen."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradsieve.auto.chooser import WATCHED_STEPS, Candidate, Chooser
from gradsieve.auto.network import GLANCE_BYTES, measured_pace
from gradsieve.auto.timing import Timing, gathered
from gradsieve.comm import Comm, CountingComm
from gradsieve.stats import Stats

GLANCE_SHARE = 0.01  # of the time of training, for glances at the network; more follows faster

_log = logging.getLogger("gradsieve")


class Present(NamedTuple):
    """The step that is being made."""

    began: float
    bytes_before: int


class Decision:
    """The decision for one model on one rank. All ranks make it together, since it communicates.

    A subclass does what the chooser says.
    """

    def __init__(self, candidates: Sequence[Candidate], comm: CountingComm, device: torch.device, stats: Stats) -> None:
        self.chooser = Chooser(candidates)
        self.exposed_seconds = 0.0  # of the present step
        self._comm, self._device, self._stats = comm, device, stats
        self._present: Present | None = None
        self.seconds: float | None = None  # of the present step, if it has ended
        self._unseen_seconds = 0.0  # since the last glance at the network; the same on all ranks
        self._glance_cost = 0.0  # seconds of the last glance; the same on all ranks
        self._most_bytes = max(candidate.least_bytes for candidate in candidates)
        with comm.aside() as beside:
            self._pace = measured_pace(beside, self._most_bytes)
        self.chooser.begin(self._pace.seconds_per_byte)

    def begin_step(self) -> None:
        """Note the beginning of what is measured of a step."""
        self.exposed_seconds, self.seconds = 0.0, None
        self._present = Present(self._now(), self._comm.traffic.bytes_sent)

    def end_step(self) -> None:
        """Note its end."""
        if self._present is not None:
            self.seconds = self._now() - self._present.began

    def end_exposed_step(self) -> None:
        """Note its end, if all of it was waiting for an exchange: nothing is hidden behind computing."""
        self.end_step()
        self.exposed_seconds = self.seconds or 0.0

    def record(self) -> None:
        """Count the present step."""
        timing = None
        if self._present is not None and self.seconds is not None:
            sent = self._comm.traffic.bytes_sent - self._present.bytes_before
            timing = Timing(self.seconds, self.exposed_seconds, sent)
        self.chooser.record(timing)
        self._present = None

    def compare(self) -> None:
        """Compare the times of all ranks, and choose. All ranks call it together when `chooser.is_due`."""
        chooser, before = self.chooser, self.chooser.is_trying
        with self._comm.aside() as beside:
            timings = gathered(chooser.own(), beside)
            if chooser.compare(timings) or self._glance(timings, beside):
                self._pace = measured_pace(beside, self._most_bytes)
                chooser.begin(self._pace.seconds_per_byte)
        if before and not chooser.is_trying:
            self._stats.decided = chooser.decided()
            if self._comm.rank == 0:
                _log.info("gradsieve: decided at step %d: %s", self._stats.steps, self)

    def _glance(self, timings: Sequence[Timing], beside: Comm) -> bool:
        """Look at the network if that takes less than `GLANCE_SHARE` of the time. Whether it has become much faster."""
        if not self.chooser.sends_less:
            return False
        self._unseen_seconds += WATCHED_STEPS * max((t.seconds for t in timings if t.is_known), default=0.0)
        if self._unseen_seconds * GLANCE_SHARE < self._glance_cost:
            return False
        pace = measured_pace(beside, GLANCE_BYTES)
        self._unseen_seconds, self._glance_cost = 0.0, pace.cost_seconds
        return self.chooser.glances(pace.seconds_per_byte)

    def __str__(self) -> str:
        """What is decided and why, in a sentence without a full stop."""
        decided, trying = self.chooser.decided(), self.chooser.candidates[self.chooser.current].name
        if decided is None:
            return f"nothing yet, trying {trying}"
        return f"{decided}, trying {trying} again" if self.chooser.is_trying else str(decided)

    def state(self) -> dict[str, Any]:
        """Return the decision, to be continued by `load`."""
        return {"chooser": self.chooser.state()}

    def load(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Continue from a state. With other ranks or candidates a new trial begins."""
        if same_ranks and self.chooser.fits(state["chooser"]):
            self.chooser.load(state["chooser"])
            self._stats.decided = self.chooser.decided()
        else:
            self.chooser.begin(self._pace.seconds_per_byte)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
