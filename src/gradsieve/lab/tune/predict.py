"""Predicted time per training step: computing, and the part of the exchange that backward does not hide.

Groups of gradients become ready one after the other while backward runs, and one thread exchanges them in that order.
So a step ends when the last group has been exchanged. Updates are exchanged before the forward pass: nothing is hidden.

If the model computes on the processor that also exchanges, only the time of bytes on the network is hidden. The
processor's part of the exchange makes backward longer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.baselines.baseline import WHOLE_MODEL_MB
from gradsieve.lab.tune.fit import NOTHING, Constants
from gradsieve.lab.tune.job import Job
from gradsieve.lab.tune.method import DENSE, Method

SLOWEST, FASTEST = 1e6, 1e12  # bits per second between which methods are compared


@dataclass(frozen=True)
class Part:
    """The exchange of one group or bucket."""

    numel: int  # of its gradients
    busy_seconds: float
    network_seconds: float


@dataclass(frozen=True)
class Model:
    """Everything that has been measured of one world."""

    size: int
    bits_per_second: float  # that each rank receives, measured
    gradients: dict[tuple[str, str], Constants] = field(default_factory=dict)  # one exchange, by recipe and code
    updates: Constants = NOTHING
    baselines: dict[str, Constants] = field(default_factory=dict)
    hook: Constants = NOTHING  # what a training step needs besides its exchanges
    calibration: dict[Method, float] = field(default_factory=dict)  # measured over modelled, if timed itself

    def calibrated(self, method: Method, factor: float) -> Model:
        return replace(self, calibration={**self.calibration, method: factor})

    def step_seconds(self, method: Method, job: Job, bits_per_second: float | None = None) -> float:
        """Seconds per step, at the measured bandwidth or at another one."""
        parts = self.parts(method, job, bits_per_second or self.bits_per_second)
        if method.of_updates:
            return job.compute_seconds + sum(part.busy_seconds + part.network_seconds for part in parts)
        return overlapped_seconds(parts, job)

    def exchange_seconds(self, method: Method, job: Job, bits_per_second: float | None = None) -> float:
        """Seconds of the exchange by itself, nothing hidden."""
        parts = self.parts(method, job, bits_per_second or self.bits_per_second)
        return sum(part.busy_seconds + part.network_seconds for part in parts)

    def bytes_received(self, method: Method, job: Job) -> float:
        """Bytes that a rank receives per step."""
        if method.is_baseline:
            return BASELINES[method.recipe].bytes_received(job.shapes, self.size)
        constants = self._constants(method)
        groups, whole = job.groups(of_updates=method.of_updates)
        sent = sum(constants.bytes_received(numel, _sent(numel, method.density)) for numel in groups)
        return sent + self._whole_bytes(whole)

    def parts(self, method: Method, job: Job, bits_per_second: float) -> list[Part]:
        """The exchanges of one step, in order."""
        per_byte, factor = 8 / bits_per_second, self._factor(method)
        constants = self._constants(method)
        if method.is_baseline:
            return self._buckets(method, job, constants.scaled(factor), per_byte)
        groups, whole = job.groups(of_updates=method.of_updates)
        found = []
        for numel in groups:
            sent = _sent(numel, method.density)
            busy = constants.busy_seconds(numel, sent)
            if not method.of_updates:
                busy += self.hook.per_entry_seconds * numel
            network = constants.network_share * constants.bytes_received(numel, sent) * per_byte
            found.append(Part(numel, factor * busy, factor * network))
        step = 0.0 if method.of_updates else self.hook.fixed_seconds
        if whole or step:
            dense = self.baselines.get(DENSE, NOTHING)
            busy = dense.busy_seconds(whole, 0) if whole else 0.0
            found.append(Part(whole, factor * (busy + step), factor * self._whole_bytes(whole) * per_byte))
        return found

    def _factor(self, method: Method) -> float:
        """Measured over modelled time. For a method that was not timed itself, the median of those like it.

        At low densities most of a step is fixed time, which short exchanges understate for all recipes alike.
        """
        if method in self.calibration:
            return self.calibration[method]
        alike = [
            factor
            for other, factor in self.calibration.items()
            if (other.of_updates, other.is_baseline, other.density) == (method.of_updates, False, method.density)
        ]
        return median(alike) if alike and not method.is_baseline else 1.0

    def _buckets(self, method: Method, job: Job, constants: Constants, per_byte: float) -> list[Part]:
        one = BASELINES[method.recipe].bucket_mb == WHOLE_MODEL_MB
        count = 1 if one else job.num_buckets()
        network = constants.network_share * self.bytes_received(method, job) * per_byte / count
        busy = constants.fixed_seconds + constants.per_entry_seconds * job.numel / count
        return [Part(job.numel // count, busy, network)] * count

    def _constants(self, method: Method) -> Constants:
        if method.is_baseline:
            return self.baselines[method.recipe]
        return self.updates if method.of_updates else self.gradients[method.recipe, method.values]

    def _whole_bytes(self, numel: int) -> float:
        return 2 * 4 * numel * (self.size - 1) / self.size


def _sent(numel: int, density: float) -> int:
    return max(1, round(density * numel))


def overlapped_seconds(parts: Sequence[Part], job: Job) -> float:
    """When the last part has been exchanged, if parts become ready in proportion to their share of backward."""
    total = max(1, sum(part.numel for part in parts))
    slower = sum(part.busy_seconds for part in parts) if job.on_processor else 0.0
    backward, ready, ended = job.backward_seconds + slower, 0.0, 0.0
    for part in parts:
        ready += backward * part.numel / total
        own = part.network_seconds + (0.0 if job.on_processor else part.busy_seconds)
        ended = max(ready, ended) + own
    return job.forward_seconds + max(backward, ended)


def crossing(faster: Callable[[float], bool]) -> float | None:
    """The bandwidth from which on `faster` is no longer true, or None if it is true everywhere or nowhere."""
    grid = np.geomspace(SLOWEST, FASTEST, 61)
    holds = [faster(float(rate)) for rate in grid]
    ends = [number for number in range(1, len(grid)) if holds[number - 1] and not holds[number]]
    if not ends:
        return None
    low, high = float(grid[ends[-1] - 1]), float(grid[ends[-1]])
    for _ in range(25):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if faster(middle) else (low, middle)
    return high
