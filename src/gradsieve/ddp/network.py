"""A process group of a sieve's own, and the worker that makes all calls on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradsieve.comm import CountingComm, TorchComm
from gradsieve.comm.twin import checked_timeout, twin_of
from gradsieve.engine import handshake
from gradsieve.engine.worker import Worker

T = TypeVar("T")


class Network(NamedTuple):
    """A process group of our own, its comm, and the worker, which makes all calls on the group."""

    group: dist.ProcessGroup
    comm: CountingComm
    worker: Worker
    timeout_seconds: float

    @classmethod
    def twin(cls, group: dist.ProcessGroup, timeout_seconds: float | None) -> Network:
        seconds = checked_timeout(group, timeout_seconds)
        own = twin_of(group, seconds)
        return cls(own, CountingComm(TorchComm(own, timeout_seconds=seconds)), Worker(own.group_name), seconds)

    @property
    def ends(self) -> tuple[Worker, dist.ProcessGroup]:
        return self.worker, self.group

    def agree(self, device: torch.device, facts: Mapping[str, str]) -> None:
        def compare() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            handshake.compare(facts, self.comm)

        self.call(compare)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the worker. If it fails, the worker ends."""
        try:
            return self.worker.call(work)
        except BaseException:
            self.worker.close()
            raise
