"""DDP in exchange of updates: gradients stay on their rank, and each backward pass exchanges the residuals meanwhile.

1. A forward pass with gradients runs on the local model (`LocalModel.ahead`).
2. The first bucket of a backward pass starts the exchange of all residuals on the worker's thread. Buckets go back to
   DDP as they are: every rank keeps its own gradient.
3. At the end of backward the exchange is done, and what went wrong is raised.
4. The optimizer steps on the local model; then the parameters come to rest on the shared one.
The exchange hides behind backward, and includes every step except the one under way. A rank whose scaler skips a step
takes part all the same, with nothing new to deliver.

No `from __future__ import annotations` here: DDP reads the hook's annotations and must find types, not texts.
"""

import threading
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

    def follow(self, local: LocalModel, optimizer: Optimizer) -> None:
        """Keep the local model and the optimizer whose updates are exchanged."""
        local.join(self._updates)
        self.local, self.optimizer = local, optimizer

    @property
    def _updates(self) -> UpdateEngine:
        assert isinstance(self.engine, UpdateEngine)
        return self.engine

    def shared_parameters(self) -> Mapping[str, Tensor]:
        """The shared model's parameters, flat, by name; the same on every rank, bit for bit."""
        return self.local.shared

    def state_dict(self) -> dict[str, Any]:
        """All this rank must know to go on exactly as it would have, its optimizer's state included."""
        ((key, own),) = super().state_dict().items()
        engine = self._updates
        return {
            key: {
                **own,
                OPTIMIZER_KEY: self.optimizer.state_dict(),
                "local_steps_done": engine.local_steps_done,
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
        self._updates.local_steps_done = own["local_steps_done"]
        self._updates.load_outer_state(own["outer"])
        if self.local.is_ahead:
            self.local.exchanged()


class UpdateFeed:
    """One DDP model's backward passes to one engine of updates: the state of the hook."""

    def __init__(self, sieve: UpdateSieve, names: Mapping[Tensor, str]) -> None:
        assert sieve.worker is not None, "under DDP a thread exchanges"
        assert isinstance(sieve.engine, UpdateEngine)
        self.sieve = sieve  # held here, so that it lives as long as the model even if the user lets go of it
        self.engine = sieve.engine
        self.worker = sieve.worker
        self.names = names
        self.has_run = False
        self._pass: UpdatePass | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """One bucket of one backward pass, which goes back as it came."""
        self.has_run = True
        in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
        if bucket.index() == 0 and self.engine.is_due():
            self._pass = UpdatePass(self, joined=not in_backward)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        if bucket.is_last():
            if in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            else:
                self._finish()
        return future

    def _finish(self) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            current.wait()
            self.sieve.local.exchanged()


class UpdatePass:
    """The exchange of one backward pass, on the worker's thread."""

    def __init__(self, feed: UpdateFeed, *, joined: bool) -> None:
        self._feed = feed
        self._joined = joined
        self._done = threading.Event()
        self._error: BaseException | None = None
        feed.worker.submit(self._run)

    def wait(self) -> None:
        """Until all groups are exchanged; raises what went wrong."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        engine, index = self._feed.engine, None
        try:
            self._compare()
            step = engine.begin(joined=self._joined)
            for index in range(len(engine.groups)):
                step.exchange(index)
            step.finish()
        except BaseException as error:
            self._error = placed(error, engine, index)
        self._done.set()
        if self._error is None:
            self._feed.sieve.report()

    def _compare(self) -> None:
        """All ranks' shared models, if it is time."""
        engine = self._feed.engine
        every = engine.settings.check_replicas_every
        if every and engine.steps_done % every == 0:
            compare_replicas(engine.shared, engine.comm)


def update_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function DDP is given."""
    feed: UpdateFeed = state
    return feed.take(bucket)


def bind(module: nn.Module, optimizer: Optimizer, local: LocalModel) -> None:
    """Move the parameters ahead before training passes, and to rest after steps, for evaluation and for saving."""
    held = weakref.ref(local)

    def call(action: Callable[[LocalModel], None]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if (model := held()) is not None:
                action(model)

        return hook

    def turn(model: LocalModel) -> None:
        model.ahead() if torch.is_grad_enabled() else model.rest()

    module.register_forward_pre_hook(call(turn))
    module.register_state_dict_pre_hook(call(LocalModel.rest))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(call(LocalModel.rest))  # type: ignore[no-untyped-call]
    optimizer.register_step_pre_hook(call(LocalModel.refresh))
    optimizer.register_step_post_hook(call(LocalModel.rest))


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
