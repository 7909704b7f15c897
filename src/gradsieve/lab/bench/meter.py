"""One step of one rank, on the clock and on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Meter:
    """Times steps that all ranks start together."""

    in_network: bool  # whether this rank has a host of its own, whose interface nobody else uses

    def __call__(self, step: Callable[[], None]) -> Exchanged:
        """Run a step after a barrier."""
        # Read before the barrier, which adds a few hundred bytes: after it a quick peer's data may be here already.
        before = interface_counters().bytes_received if self.in_network else None
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        received = None if before is None else interface_counters().bytes_received - before
        return Exchanged(seconds, None, received)
