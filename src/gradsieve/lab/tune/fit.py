"""From measured times to constants: how long a method needs per exchange, per entry and per entry that is sent.

seconds = fixed + numel * per_entry + sent * per_sent + bytes received * seconds per byte

The last term is physical: the bytes are counted, and the bandwidth is measured by itself. The other three are what the
processors and the latency take, and are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """A measured exchange of one vector."""

    numel: int
    sent: int  # entries that each rank selects
    seconds: float
    bytes_received: float


@dataclass(frozen=True)
class Constants:
    """What one exchange takes."""

    fixed_seconds: float = 0.0
    per_entry_seconds: float = 0.0
    per_sent_seconds: float = 0.0
    bytes_per_sent: float = 0.0  # at density 1; indices take more where entries are rarer
    bytes_per_halving: float = 0.0  # more bytes per sent entry for each halving of the density
    network_share: float = 1.0  # of the time that its bytes take alone; below 1, some arrive while the processor works

    def busy_seconds(self, numel: float, sent: float) -> float:
        """Without the time that bytes take on the network."""
        return self.fixed_seconds + numel * self.per_entry_seconds + sent * self.per_sent_seconds

    def bytes_received(self, numel: float, sent: float) -> float:
        if sent <= 0:
            return 0.0
        halvings = math.log2(max(1.0, numel / sent))
        return sent * (self.bytes_per_sent + halvings * self.bytes_per_halving)

    def seconds(self, numel: float, sent: float, seconds_per_byte: float) -> float:
        network = self.network_share * self.bytes_received(numel, sent) * seconds_per_byte
        return self.busy_seconds(numel, sent) + network

    def scaled(self, factor: float) -> Constants:
        """All times of the processor multiplied."""
        return replace(
            self,
            fixed_seconds=factor * self.fixed_seconds,
            per_entry_seconds=factor * self.per_entry_seconds,
            per_sent_seconds=factor * self.per_sent_seconds,
        )


NOTHING = Constants()


def fit(samples: Sequence[Sample], seconds_per_byte: float) -> Constants:
    """Least squares of the relative error, with no constant below zero."""
    times = np.array([sample.seconds for sample in samples])
    network = seconds_per_byte * np.array([sample.bytes_received for sample in samples])
    share = min(1.0, float(np.min(times / np.maximum(network, 1e-12))))
    left = times - share * network
    columns = np.array([[1.0, sample.numel, sample.sent] for sample in samples])
    fixed, per_entry, per_sent = nonnegative(columns / times[:, None], left / times)
    per_sent_bytes = [(_halvings(sample), sample.bytes_received / max(1, sample.sent)) for sample in samples]
    system = np.array([[1.0, halvings] for halvings, _ in per_sent_bytes])
    wanted = np.array([each for _, each in per_sent_bytes])
    base, more = nonnegative(system, wanted) if np.ptp(system[:, 1]) > 0.1 else (float(wanted.mean()), 0.0)
    return Constants(fixed, per_entry, per_sent, base, more, share)


def nonnegative(system: np.ndarray, wanted: np.ndarray) -> list[float]:
    """The least-squares solution without negative numbers: the best over all choices of unknowns that are zero."""
    num_unknowns = system.shape[1]
    best, least = [0.0] * num_unknowns, float(np.sum(wanted**2))
    for count in range(1, num_unknowns + 1):
        for chosen in combinations(range(num_unknowns), count):
            part = system[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)  # per entry and per exchange differ by a million
            found = np.linalg.lstsq(part / scale, wanted, rcond=None)[0] / scale
            error = float(np.sum((part @ found - wanted) ** 2))
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = [0.0] * num_unknowns, error
                for index, value in zip(chosen, found, strict=True):
                    best[index] = float(value)
    return best


def _halvings(sample: Sample) -> float:
    return math.log2(max(1.0, sample.numel / max(1, sample.sent)))
