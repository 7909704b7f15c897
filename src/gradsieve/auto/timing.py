"""What is measured of each step, and how the figures of all ranks become one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsieve.comm import Comm


class Timing(NamedTuple):
    """One step of one rank, or the medians of several steps."""

    seconds: float  # of the part of a step that differs between candidates
    exposed_seconds: float  # of them, waiting for an exchange
    bytes_sent: float

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return not math.isnan(self.seconds)


NOTHING = Timing(math.nan, math.nan, math.nan)


def typical(timings: Sequence[Timing]) -> Timing:
    """Return the medians."""
    return Timing(*map(statistics.median, zip(*timings, strict=True))) if timings else NOTHING


def slowest(timings: Sequence[Timing]) -> Timing:
    """Return the largest time of all ranks that measured any: a step takes as long as on its slowest rank.

    Of the waiting times the smallest counts: a rank that waits longer waits for a slower rank, not for the network.
    """
    found = [timing for timing in timings if timing.is_known]
    if not found:
        return NOTHING
    seconds, exposed, sent = zip(*found, strict=True)
    return Timing(max(seconds), min(exposed), max(sent))


def gathered(own: Timing, comm: Comm) -> list[Timing]:
    """Return the timings of all ranks in rank order, the same on every rank."""
    parts = comm.all_gather_v(torch.tensor(own, dtype=torch.float64))
    return [Timing(*part.tolist()) for part in parts]
