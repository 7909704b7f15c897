"""The communication hook for updates: gradients stay on their rank, and residuals are exchanged between two steps.

1. A backward pass that synchronizes returns its buckets to DDP unchanged: each rank keeps its own gradient.
2. The optimizer steps on the local model. Afterwards the parameters hold the shared model.
3. The next forward pass with gradients exchanges the residuals first, and then runs on the local model.

The exchange is not hidden behind a backward pass. It could be, one step late, but then the model learns less
(`docs/optimizers.md`). It is part of the forward pass and not of the optimizer's step, because a rank whose scaler
skips a step must take part as well.

No `from __future__ import annotations` here: DDP reads the hook's annotations, which must be types, not strings.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsieve.ddp.hook import NO_GRAPH_TASK
from gradsieve.ddp.located import located
from gradsieve.engine.replicas import compare_replicas
from gradsieve.updates import UpdateEngine, UpdateSieve


class UpdateFeed:
    """The state of the hook: passes of one DDP model, and exchanges of one engine of updates."""

    def __init__(self, sieve: UpdateSieve, names: Mapping[Tensor, str]) -> None:
        assert sieve.worker is not None, "under DDP a worker exchanges"
        assert isinstance(sieve.engine, UpdateEngine)
        self.sieve = sieve  # held here, so that it lives as long as the model even if the user drops it
        self.engine = sieve.engine
        self.worker = sieve.worker
        self.names = names
        self.has_run = False
        sieve.exchange_by(self.exchange)

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Take one bucket of one backward pass, and return it unchanged."""
        self.has_run = True
        if bucket.index() == 0 and torch._C._current_graph_task_id() == NO_GRAPH_TASK:
            self.exchange(joined=True)  # DDP's `join`: this rank's inputs have ended, and it runs no forward pass
        if bucket.is_last():
            self.engine.count_local_step()
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        future.set_result(buffer)
        return future

    def exchange(self, *, joined: bool = False) -> None:
        """Exchange all residuals if that is due."""
        self.sieve.before_training()
        if self.engine.is_due:
            self.engine.is_due = False
            self.between_steps(joined)

    def between_steps(self, joined: bool) -> None:
        """Exchange what the last step left to exchange: on the worker, while this thread waits."""
        self.sieve.local.take_on()
        self.worker.call(lambda: self._located(lambda: self._exchange(joined)))
        self.sieve.local.exchanged()

    def _exchange(self, joined: bool) -> None:
        self._compare(joined)
        self.engine.exchange_all(joined=joined)
        self.sieve.report()

    def _located(self, work: Callable[[], None]) -> None:
        """Let errors name rank, step and group."""
        try:
            work()
        except BaseException as error:
            raise located(error, self.engine, self.engine.current) from error

    def _is_compared(self) -> bool:
        every = self.engine.settings.check_replicas_every
        return bool(every) and self.engine.steps_done % every == 0

    def _compare(self, joined: bool) -> None:
        """Compare the shared models of all ranks if that is due."""
        if self._is_compared():
            compare_replicas(self.engine.shared, self.engine.comm, joined=joined)


def update_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that DDP calls for each bucket of gradients."""
    feed: UpdateFeed = state
    return feed.take(bucket)
