"""DDP in exchange of updates: gradients stay on their rank, and residuals are exchanged between two steps.

1. A backward pass that synchronizes gives its buckets back to DDP as they are: every rank keeps its own gradient.
2. The optimizer steps on the local model; then the parameters come to rest on the shared one.
3. The next forward pass with gradients exchanges the residuals first, and then runs on the local model.

The exchange is not hidden behind a backward pass. It could be, one step late, at the price of some learning
(`docs/optimizers.md`). It belongs to the forward pass and not to the optimizer's step because a rank whose scaler skips
a step must take part all the same.

No `from __future__ import annotations` here: DDP reads the hook's annotations and must find types, not texts.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from gradsieve.ddp.hook import NO_GRAPH_TASK, placed
from gradsieve.errors import InputError
from gradsieve.optim.adam import AWARE, OwnGradients, adapt
from gradsieve.replicas import compare_replicas
from gradsieve.reshard import Keep, key_of
from gradsieve.sieve import Sieve
from gradsieve.updates import LocalModel, UpdateEngine

OPTIMIZER_KEY = "optimizer"


class UpdateSieve(Sieve):
    """The handle of a model whose updates are exchanged. Each rank's optimizer state is its own, and saved with it."""

    local: LocalModel
    optimizer: Optimizer

    def follow(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Keep the local model and the optimizer whose updates are exchanged."""
        self.local, self.optimizer = LocalModel(parameters, self._updates), optimizer

    @property
    def _updates(self) -> UpdateEngine:
        assert isinstance(self.engine, UpdateEngine)
        return self.engine

    def shared_parameters(self) -> Mapping[str, Tensor]:
        """The shared model's parameters, flat, by name; the same on every rank, bit for bit."""
        return self._updates.shared

    def state_dict(self) -> dict[str, Any]:
        """All this rank must know to go on exactly as it would have, its optimizer's state included."""
        ((key, own),) = super().state_dict().items()
        engine = self._updates
        return {
            key: {
                **own,
                OPTIMIZER_KEY: self.optimizer.state_dict(),
                "local_steps_done": engine.local_steps_done,
                "is_due": engine.is_due,
                "outer": engine.outer_state(),
            }
        }

    def load_state_dict(self, states: Mapping[str, Any], *, keep: Keep = "mean") -> None:
        """Go on from what `state_dict` gave on this rank, or on all ranks of a run of another size.

        `keep="mean"` preserves the mean of all local models. A rank without a state of its own takes over the optimizer
        state of rank r modulo the old size.
        """
        comm = self.engine.comm
        super().load_state_dict(states, keep=keep)
        own = states.get(key_of(comm.rank, comm.size))
        if own is None:
            ordered = [states[key_of(rank, len(states))] for rank in range(len(states))]
            own = ordered[comm.rank % len(ordered)]
        if OPTIMIZER_KEY not in own:
            raise InputError(
                f"rank {comm.rank}: the state is of a run that exchanged gradients, this one exchanges updates"
            )
        self.optimizer.load_state_dict(own[OPTIMIZER_KEY])
        self._updates.local_steps_done, self._updates.is_due = own["local_steps_done"], own["is_due"]
        self._updates.load_outer_state(own["outer"])
        if self.local.is_ahead:
            self.local.exchanged()


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

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """One bucket of one backward pass, which goes back as it came."""
        self.has_run = True
        if bucket.index() == 0 and torch._C._current_graph_task_id() == NO_GRAPH_TASK:
            self.exchange(joined=True)  # DDP's `join`: this rank's inputs have ended, and it runs no forward pass
        if bucket.is_last():
            self.engine.count_local_step()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def exchange(self, *, joined: bool = False) -> None:
        """Exchange all residuals if it is time. Runs on the worker's thread, and is waited for."""
        if self.engine.is_due:
            self.engine.is_due = False
            self.sieve.local.take_on()
            self.worker.call(lambda: self._exchange(joined))
            self.sieve.local.exchanged()

    def _exchange(self, joined: bool) -> None:
        engine, index = self.engine, None
        try:
            self._compare(joined)
            step = engine.begin(joined=joined)
            for index in range(len(engine.groups)):
                step.exchange(index)
            step.finish()
        except BaseException as error:
            raise placed(error, engine, index) from error
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


def bind(module: nn.Module, optimizer: Optimizer, feed: UpdateFeed) -> None:
    """Exchange and move ahead before training passes; come to rest after steps, for evaluation and for saving."""
    held = weakref.ref(feed)

    def call(action: Callable[[UpdateFeed], None]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if (found := held()) is not None:
                action(found)

        return hook

    def turn(feed: UpdateFeed) -> None:
        if torch.is_grad_enabled():
            feed.exchange()
            feed.sieve.local.ahead()
        else:
            feed.sieve.local.rest()

    rest = call(lambda feed: feed.sieve.local.rest())
    module.register_forward_pre_hook(call(turn))
    module.register_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    optimizer.register_step_pre_hook(call(lambda feed: feed.sieve.local.ahead()))
    optimizer.register_step_post_hook(rest)


def checked_optimizer(optimizer: object, parameters: Mapping[str, Tensor]) -> Optimizer:
    """The torch optimizer inside a framework's wrapper; or one sentence why it cannot train this model."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    owned = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    if not any(id(tensor) in owned for tensor in parameters.values()):
        raise InputError("the optimizer has none of the model's parameters: give the one that trains this model")
    return optimizer


def aware(optimizer: Optimizer, num_ranks: int) -> Optimizer:
    """The optimizer, told how many ranks step on own gradients; torch's Adam and AdamW are adapted in place."""
    if type(optimizer) in AWARE:
        adapt(optimizer)
    if isinstance(optimizer, OwnGradients):
        optimizer.for_ranks(num_ranks)
    return optimizer
