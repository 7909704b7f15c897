"""Seconds and bytes of one step on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsieve.comm import Traffic
from gradsieve.lab.network.counters import interface_counters


class StepSample(NamedTuple):
    """Measurements of one step on one rank."""

    seconds: float
    traffic: Traffic | None  # payload, if it can be counted
    interface_bytes: int | None  # received by the host's interface, if the rank has its own host

    def with_traffic(self, traffic: Traffic) -> StepSample:
        return self._replace(traffic=traffic)


# Long enough for the all_reduce that agrees on the start. On links with more latency than this, ranks start one by one.
AGREEING_SECONDS = 0.02


@dataclass(frozen=True)
class Meter:
    """Times steps that all ranks start at the same moment. Ranks are processes on one machine and share its clock."""

    in_network: bool  # whether this rank has its own host, whose interface no other rank uses

    def __call__(self, step: Callable[[], None]) -> StepSample:
        """Run a step at an agreed time. After a barrier instead, late ranks would slow down those that have started."""
        agreed = torch.tensor(time.perf_counter() + AGREEING_SECONDS, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        before = interface_counters().bytes_received if self.in_network else None
        started = max(float(agreed), time.perf_counter())
        time.sleep(max(0.0, started - time.perf_counter()))
        step()
        seconds = time.perf_counter() - started
        received = None if before is None else interface_counters().bytes_received - before
        return StepSample(seconds, None, received)
