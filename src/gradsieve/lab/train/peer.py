"""One of torch's own hooks in a training run, set up as its documentation advises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from gradsieve.lab.peers import Peer, dense_bytes


class PeerAtWork:
    """A peer of one replica. Local SGD's models differ between averagings; what is scored is their mean."""

    def __init__(self, peer: Peer, bare: nn.Module, total_steps: int) -> None:
        self.start = peer.num_dense_steps(total_steps)
        self.model = DistributedDataParallel(bare, bucket_cap_mb=peer.bucket_mb)
        if peer.make_hook is not None:
            self.model.register_comm_hook(*peer.make_hook(self.start))
        self._bare = bare
        self._averager = None
        if peer.local_steps > 1:
            self._averager = PeriodicModelAverager(peer.local_steps, warmup_steps=self.start)
        shapes = [parameter.shape for parameter in bare.parameters() if parameter.requires_grad]
        self._bytes = [round(count(shapes, dist.get_world_size())) for count in (dense_bytes, peer.bytes_received)]

    def bytes_received(self, step: int) -> int:
        """In a step, counted from 0: computed from what the hook does, not counted."""
        return self._bytes[step >= self.start]

    def after_update(self) -> None:
        """What is left to do when the optimizer has moved the parameters."""
        if self._averager is not None:
            self._averager.average_parameters(self._bare.parameters())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean of all ranks'; where replicas stay equal they are anyway."""
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
