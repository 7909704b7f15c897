"""The communication hook's state for `recipe="auto"`: updates are exchanged sparsely, or gradients densely.

No `from __future__ import annotations` here, as in `updates.py`.
"""

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from gradsieve.ddp.hook import NO_GRAPH_TASK
from gradsieve.ddp.located import located
from gradsieve.ddp.plain import PlainSums
from gradsieve.ddp.updates import UpdateFeed
from gradsieve.updates import UpdateSieve
from gradsieve.updates.decision import UpdateDecision


class AlternatingFeed(UpdateFeed):
    """Passes of one DDP model, in the way that is faster."""

    def __init__(
        self, sieve: UpdateSieve, names: Mapping[Tensor, str], decision: UpdateDecision, sums: PlainSums
    ) -> None:
        super().__init__(sieve, names)
        self.decision = decision
        self._sums = sums

    def follow(self, optimizer: Optimizer) -> None:
        """Note the end of each step of the optimizer, after the hooks that it has already."""
        held = weakref.ref(self.decision)  # the optimizer must not keep a sieve and its worker alive

        def end_step(*_: Any) -> None:
            if (found := held()) is not None:
                found.end_step()

        optimizer.register_step_post_hook(end_step)

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Take one bucket: it is summed now, or not at all."""
        unchanged = super().take(bucket)
        if not self.decision.is_dense:
            return unchanged
        future = self._sums.take(bucket)
        if bucket.is_last() and torch._C._current_graph_task_id() != NO_GRAPH_TASK:
            # DDP queues its own callback after this one. So an error is raised before DDP waits for the futures.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        elif bucket.is_last():
            self._wait()
        return future

    def _wait(self) -> None:
        try:
            self.decision.exposed_seconds = self._sums.wait()
        except Exception as error:
            raise located(error, self.engine, None, "sum") from error

    def between_steps(self, joined: bool) -> None:
        """Choose, and exchange what the last step left to exchange."""
        decision = self.decision
        if decision.is_dense:
            self.engine.count_dense_step(decision.exposed_seconds)
        decision.record()
        if decision.chooser.is_due:
            self.worker.call(lambda: self._located(decision.compare))
        decision.begin_step()
        began = time.perf_counter()
        if decision.wants_change:
            self.sieve.local.take_on()
            self.worker.call(lambda: self._located(lambda: self._change(joined)))
        elif decision.is_dense:
            self._between_dense_steps(joined)
        else:
            super().between_steps(joined)
            decision.exposed_seconds = time.perf_counter() - began

    def _change(self, joined: bool) -> None:
        self._compare(joined)
        self.decision.change(joined=joined)
        self.sieve.report()

    def _between_dense_steps(self, joined: bool) -> None:
        if self._is_compared():
            self.sieve.local.take_on()
            self.worker.call(lambda: self._located(lambda: self._compare(joined)))
        if self.sieve.sinks:
            self.worker.submit(self.sieve.report)
