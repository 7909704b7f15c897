"""Measures how long the network takes per byte of an all_reduce, in a fraction of a second.

An all_reduce of zeros is repeated with four times the bytes, until it takes long enough or has `most_bytes`. The
difference between the last two is free of latency. Shaped links let the first kilobytes pass at full speed, so the
last message must be long.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from gradsieve.comm import Comm

FIRST_BYTES = 1 << 14
GROWTH = 4
LONG_ENOUGH_SECONDS = 0.05
GLANCE_BYTES = FIRST_BYTES * GROWTH  # of a measurement during training: rough, and short


class Pace(NamedTuple):
    """The result of a measurement, the same on every rank."""

    seconds_per_byte: float  # that a rank sends
    cost_seconds: float  # of the measurement itself


def measured_pace(comm: Comm, most_bytes: float) -> Pace:
    """Measure the network. All ranks call it together."""
    before, cost, num_bytes = 0.0, 0.0, FIRST_BYTES
    comm.all_reduce(torch.zeros(1))  # connections are opened, and all ranks have come
    while True:
        seconds = _timed(comm, num_bytes)
        cost += seconds
        if seconds >= LONG_ENOUGH_SECONDS or num_bytes >= most_bytes:
            more = num_bytes - (num_bytes // GROWTH if before else 0)
            sent_per_byte = 2 * (comm.size - 1) / comm.size
            return Pace(max(0.0, seconds - before) / more / sent_per_byte, cost)
        before, num_bytes = seconds, num_bytes * GROWTH


def _timed(comm: Comm, num_bytes: int) -> float:
    """The time of the fastest rank: a floor, since another rank may have begun late."""
    zeros = torch.zeros(num_bytes // 4)
    began = time.perf_counter()
    comm.all_reduce(zeros)
    own = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return min(float(part) for part in comm.all_gather_v(own))
