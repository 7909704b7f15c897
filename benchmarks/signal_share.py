"""How much of a rank's gradient all ranks have in common, told by other ranks and by the rank's own earlier gradients.

Dense training with Adam in one process, P ranks in turn. For each stretch of steps, over all parameters:
- factor: the root of E[mean gradient²] / E[own gradient²], which the denominator of each rank's step needs
- factor from successive gradients: its estimate by one rank alone, with the share of the signal taken as
  <gradient, first moment before it> / <gradient, gradient>

    python benchmarks/signal_share.py lstm 4 4 100 gpt 8 1 100 > benchmarks/results/signal-share.json

The arguments are workload, ranks, batch per rank and steps, once or several times.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from gradsieve.lab.bench.report import environment
from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.plan import Plan

MEMORY = 0.97  # of the averages, per step
STRETCH = 50  # steps between two rows


def batches(task: Any, sampler: Any) -> Iterator[Any]:
    while True:
        yield from task.batches(sampler)


class Averages:
    """Averages over steps of what the factors are made of."""

    def __init__(self, first_moment: float) -> None:
        self.own = self.mean = self.successive = 0.0
        self._decay, self._steps = first_moment, 0
        self._moments: torch.Tensor | None = None

    def add(self, gradients: torch.Tensor) -> None:
        """Add one step's gradients, a row per rank."""
        size = len(gradients)
        if self._moments is None:
            self._moments = torch.zeros_like(gradients)
        else:
            unbiased = self._moments / (1 - self._decay**self._steps)
            self._note("successive", float((gradients * unbiased).sum()) / size)
        self._note("own", float(gradients.square().sum()) / size)
        self._note("mean", float(gradients.mean(0).square().sum()))
        self._moments.mul_(self._decay).add_(gradients, alpha=1 - self._decay)
        self._steps += 1

    def row(self, step: int, size: int) -> dict[str, float]:
        share = min(1.0, max(0.0, self.successive / self.own))
        true_share = (size * self.mean / self.own - 1) / (size - 1)
        return {
            "step": step,
            "share": true_share,
            "share_from_successive": self.successive / self.own,
            "factor": math.sqrt(self.mean / self.own),
            "factor_from_successive": math.sqrt(share + (1 - share) / size),
        }

    def _note(self, name: str, value: float) -> None:
        setattr(self, name, MEMORY * getattr(self, name) + (1 - MEMORY) * value)


def measured(workload: str, size: int, batch: int, steps: int) -> dict[str, Any]:
    plan = Plan(workload, Choice("dense"), batch=batch, steps=steps)
    preset, task = plan.resolved(), plan.open()
    model = task.model(seed=1)
    optimizer = preset.optimizer.build(model)
    averages = Averages(optimizer.param_groups[0]["betas"][0])
    draws = [batches(task, task.sampler(rank=rank, size=size, seed=1)) for rank in range(size)]
    carry: list[Any] = [None] * size
    rows = []
    for step in range(1, steps + 1):
        gradients = []
        for rank in range(size):
            loss, carry[rank] = task.loss(model, next(draws[rank]), carry[rank])
            optimizer.zero_grad()
            loss.backward()
            gradients.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
        stacked = torch.stack(gradients)
        averages.add(stacked)
        mean = stacked.mean(0).split([parameter.numel() for parameter in model.parameters()])
        for parameter, grad in zip(model.parameters(), mean, strict=True):
            parameter.grad = grad.view_as(parameter).clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), preset.clip_norm or math.inf)
        optimizer.step()
        if step % STRETCH == 0:
            rows.append(averages.row(step, size))
            print(workload, json.dumps(rows[-1]), file=sys.stderr)
    return {"workload": workload, "ranks": size, "batch": batch, "steps": steps, "rows": rows}


def main(arguments: list[str]) -> None:
    cells = [arguments[start : start + 4] for start in range(0, len(arguments), 4)]
    results = [measured(name, *map(int, numbers)) for name, *numbers in cells]
    print(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
