"""Time per optimizer step: this library's AdamW for each rank's own gradient, against torch's fused AdamW."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from gradsieve.lab.bench.contest import Contender, Progress, contest, silent
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import Column, Report, Row, environment, milliseconds, thousands, times
from gradsieve.lab.machine import require_memory
from gradsieve.optim import AdamW
from gradsieve.updates.signal import ALWAYS_MEASURED, ENERGY, MEASURED_EVERY, SIGNAL, SignalMeter

TORCH, OURS = "torch.optim.AdamW", "gradsieve.AdamW"

COLUMNS = (
    Column("method", "method"),
    Column("numel", "numel", thousands),
    Column("tensors", "tensors", thousands),
    Column("ranks", "ranks"),
    Column("threads", "threads"),
    Column("seconds", "median", milliseconds),
    Column("mean_seconds", "mean", milliseconds),
    Column("ratio_to_torch", "mean vs torch", times),
)


@dataclass(frozen=True)
class OptimizerPlan:
    """What to measure: every combination."""

    numels: Sequence[int]
    tensors: Sequence[int]
    ranks: int
    threads: Sequence[int]
    repeats: int


class OptimizerContender(Contender[float]):
    """An optimizer with its own parameters."""

    warmup_steps = ALWAYS_MEASURED + MEASURED_EVERY  # the first steps cost more than later ones

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        (group,) = optimizer.param_groups
        self._parameters: list[Tensor] = group["params"]

    @override
    def step(self, grad: Tensor) -> float:
        """Seconds of the optimizer's step alone."""
        parts = torch.split(grad, [parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part
        started = time.perf_counter()
        self._step()
        return time.perf_counter() - started

    def _step(self) -> None:
        self.optimizer.step()


class OwnGradientContender(OptimizerContender):
    """Our AdamW for several ranks, with the sample that every eighth step takes, but not the sum over ranks."""

    def __init__(self, optimizer: AdamW, num_ranks: int) -> None:
        super().__init__(optimizer)
        optimizer.for_ranks(num_ranks)
        self._meter = SignalMeter({str(number): each for number, each in enumerate(self._parameters)}, optimizer)
        self._number = 0

    @override
    def _step(self) -> None:
        self._meter.take(self._number)
        self._number += 1
        self.optimizer.step()
        if self._number == 1:
            self._spread_shares()

    def _spread_shares(self) -> None:
        """Give parameters shares of the signal from 0 to a half, so that their steps are corrected differently."""
        for number, parameter in enumerate(self._parameters):
            state = self.optimizer.state[parameter]
            state[SIGNAL], state[ENERGY] = 0.5 * number / len(self._parameters), 1.0


def bench_optimizer(plan: OptimizerPlan, progress: Progress = silent) -> Report:
    vectors = 1 + 2 * 3  # the gradient; parameters and two moments of both optimizers
    require_memory(4 * vectors * max(plan.numels), "use a smaller --numel")
    before = torch.get_num_threads()
    rows: list[Row] = []
    try:
        for numel in plan.numels:
            for tensors in plan.tensors:
                for threads in plan.threads:
                    torch.set_num_threads(threads)
                    cell: Row = {"numel": numel, "tensors": tensors, "ranks": plan.ranks, "threads": threads}
                    rows += _measured(cell, plan.repeats, progress)
    finally:
        torch.set_num_threads(before)
    return Report(environment(), rows)


def _measured(cell: Row, repeats: int, progress: Progress) -> list[Row]:
    contenders: Mapping[str, Contender[float]] = {
        TORCH: OptimizerContender(torch.optim.AdamW(_parameters(cell), fused=True)),
        OURS: OwnGradientContender(AdamW(_parameters(cell), fused=True), cell["ranks"]),
    }
    what = f"numel {cell['numel']:,} in {cell['tensors']:,} tensors, {cell['threads']} thread(s)"
    # Whole periods: a sample is taken in every `MEASURED_EVERY`-th step, and the mean should be that of a long run.
    repeats = MEASURED_EVERY * -(-repeats // MEASURED_EVERY)
    samples = contest(what, contenders, Gradients(cell["numel"]), repeats, progress)
    means = {name: statistics.fmean(seconds) for name, seconds in samples.items()}
    return [
        {
            "method": name,
            **cell,
            "repeats": repeats,
            "seconds": statistics.median(seconds),
            "mean_seconds": means[name],
            "ratio_to_torch": means[name] / means[TORCH],
            "raw_seconds": seconds,
        }
        for name, seconds in samples.items()
    ]


def _parameters(cell: Row) -> list[Tensor]:
    parts = torch.full((cell["numel"],), 0.02).tensor_split(cell["tensors"])
    return [part.clone().requires_grad_() for part in parts]
