"""Whole training steps: DDP with `attach`, or with one of torch's hooks, around a stand-in or the user's model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradsieve.ddp import attach
from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS
from gradsieve.lab.tune.job import Work
from gradsieve.lab.tune.method import Method
from gradsieve.lab.tune.together import gathered, typical
from gradsieve.sieve import Sieve

RATE = 1e-4  # the stand-in for an optimizer moves parameters by so many times the gradient


class Descent(torch.optim.Optimizer):
    """Subtracts the gradient. It knows how long that took, since only what an exchange adds to it is counted."""

    own_seconds = 0.0

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        began = time.perf_counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
        self.own_seconds = time.perf_counter() - began


class TrainingStep:
    """A DDP model that exchanges by one method. All ranks make it, call it and close it together."""

    def __init__(self, method: Method, work: Work) -> None:
        self._loss = work.loss
        baseline = BASELINES[method.recipe] if method.is_baseline else None
        # The ranks' parameters are equal by their seed, and sending them would take minutes on a slow link.
        self.model = DistributedDataParallel(
            work.model,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if baseline is None else baseline.bucket_mb,
        )
        self._optimizer: Descent | None = None
        self._sieve: Sieve | None = None
        if baseline is not None:
            if baseline.make_hook is not None:
                self.model.register_comm_hook(*baseline.make_hook(0))
            return
        self._optimizer = Descent(work.model.parameters()) if method.of_updates else None
        self._sieve = attach(
            self.model,
            method.build(),
            density=method.density,
            optimizer=self._optimizer,
            adapt=False,
            rules=method.rules,
            check_replicas_every=0,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def __call__(self) -> float:
        """Seconds of forward and backward pass, and of what the exchange adds to the optimizer's step."""
        self.model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        self._loss(self.model).backward()  # type: ignore[no-untyped-call]
        if self._optimizer is None:
            return time.perf_counter() - began
        self._optimizer.step()
        return time.perf_counter() - began - self._optimizer.own_seconds

    @property
    def bytes_received(self) -> int:
        """So far, if this library has exchanged."""
        return 0 if self._sieve is None else self._sieve.engine.comm.traffic.bytes_received

    def close(self) -> None:
        if self._sieve is not None:
            self._sieve.close()


def timed_steps(method: Method, work: Work, warmup: int, repeats: int) -> tuple[float, float]:
    """The typical step time over all ranks, and the bytes per step of the rank that receives most."""
    step = TrainingStep(method, work)
    try:
        for _ in range(warmup):
            step()
        dist.barrier()
        before = step.bytes_received
        seconds = [step() for _ in range(repeats)]
        received = max(gathered(step.bytes_received - before)) / repeats
        return typical(seconds), received
    finally:
        step.close()
