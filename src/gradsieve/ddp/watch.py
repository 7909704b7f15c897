"""Detects training that goes on although DDP never calls the hook: nothing is exchanged then."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp.hook import Feed
from gradsieve.ddp.updates import UpdateFeed
from gradsieve.errors import GradsieveError

PATIENCE_STEPS = 3  # updates or forward passes without a call of the hook, before it raises or warns

ADVICE = (
    "gradients are not exchanged through gradsieve. Train the object that attach was given, call it (not its .module), "
    "and attach after the framework has wrapped the model"
)


class Watch:
    """Watches forward passes until the hook has run once."""

    def __init__(self, model: DistributedDataParallel, feed: Feed | UpdateFeed) -> None:
        self._feed = weakref.ref(feed)
        self._model = weakref.ref(model)
        self._passes = 0  # forward passes that should have been followed by an exchange
        self._updates = 0  # changes of the parameters between these passes
        self._version: int | None = None
        # On the inner module, since the aim is to find frameworks that bypass DDP's own forward.
        self._handle = model.module.register_forward_hook(self._look)

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        feed, model = self._feed(), self._model()
        if feed is None or model is None or feed.has_run:
            self._handle.remove()
            return
        if not module.training or not torch.is_grad_enabled() or not model.require_backward_grad_sync:
            return
        version = next(iter(feed.names))._version
        self._updates += self._version is not None and version != self._version
        self._version = version
        self._passes += 1
        rank = feed.engine.comm.rank
        if self._updates >= PATIENCE_STEPS:
            raise GradsieveError(
                f"rank {rank}: the parameters have been updated {self._updates} times and DDP has not called the hook "
                f"once: {ADVICE}"
            )
        if self._passes == PATIENCE_STEPS + 1:
            warnings.warn(
                f"rank {rank}: {PATIENCE_STEPS} forward passes for training and DDP has not called the hook once; if "
                f"backward passes ran between them, {ADVICE}",
                RuntimeWarning,
                stacklevel=2,
            )
