"""A baseline in a training run, set up as torch's documentation advises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from gradsieve.lab.baselines.baseline import Baseline, dense_bytes


class BaselineModel:
    """One replica's DDP model with the hook of a baseline.

    With local SGD the models differ between averagings. The mean of the models is what is scored.
    """

    def __init__(self, baseline: Baseline, bare: nn.Module, total_steps: int) -> None:
        self.start = baseline.num_dense_steps(total_steps)
        self.model = DistributedDataParallel(bare, bucket_cap_mb=baseline.bucket_mb)
        if baseline.make_hook is not None:
            self.model.register_comm_hook(*baseline.make_hook(self.start))
        self._bare = bare
        self._averager = None
        if baseline.local_steps > 1:
            self._averager = PeriodicModelAverager(baseline.local_steps, warmup_steps=self.start)
        shapes = [parameter.shape for parameter in bare.parameters() if parameter.requires_grad]
        self._bytes = [round(count(shapes, dist.get_world_size())) for count in (dense_bytes, baseline.bytes_received)]

    def bytes_received(self, step: int) -> int:
        """Bytes this rank receives in a step, counted from 0. Computed from what the hook sends, not measured."""
        return self._bytes[step >= self.start]

    def after_update(self) -> None:
        """Average the models if it is time. Call it after the optimizer's step."""
        if self._averager is not None:
            self._averager.average_parameters(self._bare.parameters())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean over all ranks. Where replicas stay equal, nothing changes."""
        if self._averager is None:
            yield
            return
        parameters = [parameter.detach() for parameter in self._bare.parameters()]
        own = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())
        yield
        for parameter, values in zip(parameters, own, strict=True):
            parameter.copy_(values)
