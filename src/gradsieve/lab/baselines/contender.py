"""A baseline in `gradsieve bench reduce`.

A hook runs as it does in training: inside a DDP model with the layers of a VGG-16, scaled to the requested number of
entries. Only the backward pass is shortened: it hands over a prepared gradient. A step is timed from there until the
mean is in `.grad`, so DDP's copies into and out of its buckets are included, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradsieve.lab.baselines.baseline import Baseline
from gradsieve.lab.baselines.layers import Layers
from gradsieve.lab.bench.contest import Contender
from gradsieve.lab.bench.meter import Meter, StepSample

WARMUP_STEPS = 4  # DDP rebuilds its buckets after the first step, PowerSGD starts at its third


class BaselineContender(Contender[StepSample]):
    """One baseline with its own DDP model."""

    warmup_steps = WARMUP_STEPS

    def __init__(self, baseline: Baseline, storage: Tensor, meter: Meter) -> None:
        """`storage` holds the values of the parameters. They are never read, so baselines may share it."""
        self._baseline = baseline
        self._meter = meter
        self._layers = Layers(storage)
        # Parameters need not be equal on all ranks here, and sending them takes seconds on a slow link.
        self._model = DistributedDataParallel(
            self._layers,
            bucket_cap_mb=baseline.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if baseline.make_hook is not None:
            self._model.register_comm_hook(*baseline.make_hook(0))
        self._averager = PeriodicModelAverager(baseline.local_steps) if baseline.local_steps > 1 else None

    @override
    def step(self, grad: Tensor) -> StepSample:
        """One step; with several local steps, the mean over one averaging period."""
        steps = self._baseline.local_steps
        parts = [self._local_step(grad) for _ in range(steps)]
        received = [part.interface_bytes for part in parts if part.interface_bytes is not None]
        seconds = sum(part.seconds for part in parts) / steps
        return StepSample(seconds, None, round(sum(received) / steps) if received else None)

    def mean(self) -> Tensor:
        """The gradient that the last step left in `.grad`, flat."""
        return torch.cat([weight.grad.reshape(-1) for weight in self._layers.weights if weight.grad is not None])

    def _local_step(self, grad: Tensor) -> StepSample:
        self._model.zero_grad(set_to_none=True)
        handed = self._model(grad)

        def backward_and_average() -> None:
            handed.backward()
            if self._averager is not None:
                self._averager.average_parameters(self._layers.parameters())

        return self._meter(backward_and_average)
