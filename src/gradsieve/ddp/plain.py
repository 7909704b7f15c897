"""Sums the gradients of one backward pass as DDP does without a hook: an all_reduce per bucket, during backward.

No `from __future__ import annotations` here, as in `hook.py`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsieve.comm.transport.link import Link
from gradsieve.ddp.located import located
from gradsieve.sieve import Sieve


class PlainSums:
    """The sums of one model's buckets, on DDP's own process group."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._link = Link(group, timeout_seconds)
        self._size = dist.get_world_size(group)
        self._under_way: list[Any] = []
        self._error: BaseException | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Start to sum a bucket. The future has the mean.

        An error is kept for `wait`: raised here, DDP would make it unreadable.
        """
        if self._error is None:
            try:
                return self._begun(bucket.buffer())
            except RuntimeError as error:
                self._error = error
        unchanged: torch.futures.Future[Tensor] = torch.futures.Future()
        unchanged.set_result(bucket.buffer())
        return unchanged

    def _begun(self, buffer: Tensor) -> "torch.futures.Future[Tensor]":
        work = dist.all_reduce(buffer.div_(self._size), group=self._link.group, async_op=True)
        self._under_way.append(work)
        future: torch.futures.Future[Tensor] = work.get_future().then(_only)
        return future

    def wait(self) -> float:
        """Wait for all sums of this backward pass, and return the seconds. A lost peer raises `PeerLostError`."""
        began = time.perf_counter()
        works, self._under_way = self._under_way, []
        error, self._error = self._error, None
        if error is not None:
            raise self._link.lost(None, error) from error
        for work in works:
            self._link.finish(work, None)
        return time.perf_counter() - began


class PlainPass:
    """One backward pass whose gradients are summed without a residual."""

    def __init__(self, sieve: Sieve, sums: PlainSums, first: Callable[[], None] | None) -> None:
        assert sieve.worker is not None, "under DDP a worker exchanges"
        self._sieve, self._sums = sieve, sums
        self._error: BaseException | None = None
        self._has_first = first is not None
        if first is not None:
            # The parameters do not change before the pass ends, since the optimizer waits for it.
            sieve.worker.submit(first, self.fail)

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Sum a bucket."""
        return self._sums.take(bucket)

    def wait(self) -> None:
        """Wait for all sums, count the step, and raise the first error."""
        engine, worker = self._sieve.engine, self._sieve.worker
        assert worker is not None
        waited = 0.0
        try:
            waited = self._sums.wait()
        except Exception as error:
            self._keep(error, "sum")
        if self._has_first:
            worker.call(lambda: None)  # the comparison of replicas is done
        if self._error is not None:
            raise self._error
        engine.count_dense_step(waited)
        if self._sieve.sinks:
            worker.submit(self._sieve.report)

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        self._keep(error, "comparison")

    def _keep(self, error: BaseException, what: str) -> None:
        self._error = self._error or located(error, self._sieve.engine, None, what)


def _only(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
    (found,) = future.value()
    return found
