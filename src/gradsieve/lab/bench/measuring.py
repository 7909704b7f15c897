"""The cost of timing: a pipeline with a clock and one without exchange the same groups, in turns, on rank processes.

Many small groups are the worst case: a small group needs as many clock readings as a large one. The cost is measured in
two ways: processor time with and without a clock, and the number of readings times the cost of one. Wall-clock time
would not do: because ranks wait for peers, two equal pipelines differ by several percent.

    python -m gradsieve.lab.bench.measuring [ranks] [groups] [entries] [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from typing_extensions import override

from gradsieve.comm import Comm, CountingComm, TorchComm
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import recipe
from gradsieve.stats.timing import Clock, timed
from gradsieve.vector.pieces import Pieces

READINGS_TIMED = 200_000
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Cost:
    """The measurements of one rank."""

    plain_milliseconds: float  # mean processor time of one round over all groups
    timed_milliseconds: float
    wall_milliseconds: float  # median wall-clock time of a round without a clock
    readings: int  # of the clock, per round
    microseconds_a_reading: float

    @property
    def share(self) -> float:
        """Additional processor time of an exchange with a clock, as a share."""
        return self.timed_milliseconds / self.plain_milliseconds - 1

    @property
    def share_of_readings(self) -> float:
        """The part of `share` that the clock readings account for."""
        return self.readings * self.microseconds_a_reading / (1000 * self.plain_milliseconds)


class CountedClock(Clock):
    """Counts its readings."""

    readings = 0

    @override
    def enter(self, phase: str) -> str:
        self.readings += 1
        return super().enter(phase)


def measure(comm: Comm, name: str, num_groups: int, numel: int, density: float, rounds: int) -> Cost:
    """Measure one recipe. All ranks call it together."""
    counted = CountedClock()
    pipelines = Pipeline(recipe(name), comm), Pipeline(timed(recipe(name), Clock()), comm)
    used, wall = [0.0, 0.0], []
    for roles in ((0, 1), (1, 0)):
        # The same run twice, with the roles swapped: some steps cost several percent more than others.
        groups = _Groups(pipelines[0], num_groups, numel, density)
        for number in range(WARM_UP_STEPS):
            groups.seconds(pipelines[number % 2])
        for _ in range(rounds):
            for which in roles:
                before = time.thread_time()
                seconds = groups.seconds(pipelines[which])
                used[which] += time.thread_time() - before
                wall += [seconds] if which == 0 else []
    groups.seconds(Pipeline(timed(recipe(name), counted), comm))
    without, with_clock = (1000 * each / (2 * rounds) for each in used)
    return Cost(without, with_clock, 1000 * statistics.median(wall), counted.readings, 1e6 * _seconds_per_reading())


class _Groups:
    def __init__(self, pipeline: Pipeline, num_groups: int, numel: int, density: float) -> None:
        generator = torch.Generator().manual_seed(pipeline.comm.rank)
        self._grads = [torch.randn(numel, generator=generator) for _ in range(num_groups)]
        self._out = torch.empty(numel)
        self._k = max(1, round(density * numel))
        self._states = [pipeline.init(Pieces([grad])) for grad in self._grads]

    def seconds(self, pipeline: Pipeline) -> float:
        began = time.perf_counter()
        for index, grad in enumerate(self._grads):
            self._states[index] = pipeline.step(grad, self._k, self._states[index], self._out)
        return time.perf_counter() - began


def _seconds_per_reading() -> float:
    clock = Clock()
    began = time.perf_counter()
    for _ in range(READINGS_TIMED):
        clock.enter("select")
    return (time.perf_counter() - began) / READINGS_TIMED


def _work(process: RankProcess, name: str, num_groups: int, numel: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    cost = measure(CountingComm(TorchComm()), name, num_groups, numel, 0.01, rounds)
    return {**asdict(cost), "share": cost.share, "share_of_readings": cost.share_of_readings}


def main(ranks: int = 2, num_groups: int = 50, numel: int = 2048, rounds: int = 20) -> None:
    """Print one line of JSON per recipe, with the figures of rank 0."""
    for name in ("oktopk", "topka", "gtopk", "dense"):
        outcome = run_rank_processes(ranks, _work, name, num_groups, numel, rounds)[0]
        print(json.dumps({"recipe": name, "ranks": ranks, "groups": num_groups, "numel": numel, **outcome}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
