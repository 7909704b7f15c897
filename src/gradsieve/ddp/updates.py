"""DDP in exchange of updates: gradients stay on their rank, and residuals are exchanged between two steps.

1. A backward pass that synchronizes gives its buckets back to DDP as they are: every rank keeps its own gradient.
2. The optimizer steps on the local model; then the parameters come to rest on the shared one.
3. The next forward pass with gradients exchanges the residuals first, and then runs on the local model.

The exchange is not hidden behind a backward pass. It could be, one step late, at the price of some learning
(`docs/optimizers.md`). It belongs to the forward pass and not to the optimizer's step because a rank whose scaler skips
a step must take part all the same.

No `from __future__ import annotations` here: DDP reads the hook's annotations and must find types, not texts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsieve.ddp.hook import NO_GRAPH_TASK, located
from gradsieve.engine.replicas import compare_replicas
from gradsieve.updates import UpdateEngine, UpdateSieve


class UpdateFeed:
    """One DDP model's passes to one engine of updates: the state of the hook."""

    def __init__(self, sieve: UpdateSieve, names: Mapping[Tensor, str]) -> None:
        assert sieve.worker is not None, "under DDP a thread exchanges"
        assert isinstance(sieve.engine, UpdateEngine)
        self.sieve = sieve  # held here, so that it lives as long as the model even if the user lets go of it
        self.engine = sieve.engine
        self.worker = sieve.worker
        self.names = names
        self.has_run = False
        sieve.exchange_by(self.exchange)

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """One bucket of one backward pass, which goes back as it came."""
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
        """Exchange all residuals if it is time. Runs on the worker's thread, and is waited for."""
        self.sieve.before_training()
        if self.engine.is_due:
            self.engine.is_due = False
            self.sieve.local.take_on()
            self.worker.call(lambda: self._exchange(joined))
            self.sieve.local.exchanged()

    def _exchange(self, joined: bool) -> None:
        engine = self.engine
        try:
            self._compare(joined)
            engine.exchange_all(joined=joined)
        except BaseException as error:
            raise located(error, engine, engine.current) from error
        self.sieve.report()

    def _compare(self, joined: bool) -> None:
        """All ranks' shared models, if it is time."""
        every = self.engine.settings.check_replicas_every
        if every and self.engine.steps_done % every == 0:
            compare_replicas(self.engine.shared, self.engine.comm, joined=joined)


def update_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function DDP is given."""
    feed: UpdateFeed = state
    return feed.take(bucket)
