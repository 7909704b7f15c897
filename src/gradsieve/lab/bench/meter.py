"""One step of one rank, on the clock and on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsieve.comm import Traffic
from gradsieve.lab.network.counters import interface_counters


class Exchanged(NamedTuple):
    """One step on one rank."""

    seconds: float
    traffic: Traffic | None  # payload, where it can be counted
    interface_bytes: int | None  # received by the host's interface, where there is one

    def with_traffic(self, traffic: Traffic) -> Exchanged:
        """With its payload."""
        return self._replace(traffic=traffic)


AGREEING_SECONDS = 0.02  # enough on one machine; where it is not, on links with much latency, clocks start one by one


@dataclass(frozen=True)
class Meter:
    """Times steps that all ranks start at the same moment: they are processes of one machine, with one clock."""

    in_network: bool  # whether this rank has a host of its own, whose interface nobody else uses

    def __call__(self, step: Callable[[], None]) -> Exchanged:
        """Run a step at a moment agreed upon: ranks that leave a barrier late would slow down those that have begun."""
        agreed = torch.tensor(time.perf_counter() + AGREEING_SECONDS, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        before = interface_counters().bytes_received if self.in_network else None
        started = max(float(agreed), time.perf_counter())
        time.sleep(max(0.0, started - time.perf_counter()))
        step()
        seconds = time.perf_counter() - started
        received = None if before is None else interface_counters().bytes_received - before
        return Exchanged(seconds, None, received)
