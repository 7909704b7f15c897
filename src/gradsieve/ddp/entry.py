"""`attach`: checks, groups, a process group and a thread of our own, a handshake, and the hook is in."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import handshake
from gradsieve.comm import CountingComm, TorchComm
from gradsieve.comm.twin import checked_timeout, twin_of
from gradsieve.ddp.hook import Feed, exchange_hook
from gradsieve.ddp.watch import Watch
from gradsieve.engine import Engine, Settings
from gradsieve.errors import InputError
from gradsieve.groups import Group, cut_into_groups
from gradsieve.recipes import Recipe
from gradsieve.recipes import recipe as named_recipe
from gradsieve.rules import Rules
from gradsieve.scaling import Scaler, check_scaler
from gradsieve.schedules import Schedule, as_schedule
from gradsieve.sieve import Sieve
from gradsieve.sinks import Sink
from gradsieve.worker import Worker

DEFAULT_GROUP_MB = 25.0
DEFAULT_CHECK_REPLICAS_EVERY = 100


def attach(
    model: DistributedDataParallel,
    recipe: str | Recipe = "oktopk",
    *,
    density: float | Schedule,
    rules: Rules | None = None,
    group_mb: float | None = DEFAULT_GROUP_MB,
    scaler: Scaler | None = None,
    local_clip_norm: float | None = None,
    check_replicas_every: int = DEFAULT_CHECK_REPLICAS_EVERY,
    timeout_seconds: float | None = None,
    sinks: Sequence[Sink] = (),
) -> Sieve:
    """Have a DDP model's gradients exchanged sparsely from its next backward pass on. All ranks call it together.

    `density` is the fraction of entries to send, or a schedule of it. `rules` say which parameters go dense.
    `group_mb` is the most that is selected from and sent as one; None is the whole model, as in the papers, and leaves
    nothing to overlap with backward. `scaler` is the `GradScaler` in use, if any. `local_clip_norm` clips each rank's
    gradient before it is added to what it owes, as DGC does. Once in `check_replicas_every` steps all ranks' parameters
    are compared; 0 is never. `timeout_seconds` is how long to wait for a peer; that of the model's process group if
    not given. `sinks` get the figures of every step.
    """
    _check_model(model)
    check_scaler(scaler)
    chosen = recipe if isinstance(recipe, Recipe) else named_recipe(recipe)
    unused = bool(model.find_unused_parameters or model.static_graph)
    settings = Settings(chosen, as_schedule(density), local_clip_norm, check_replicas_every, unused)
    the_rules = rules or Rules()
    parameters = _parameters(model)
    groups = cut_into_groups(parameters, the_rules, group_mb)
    seconds = checked_timeout(model.process_group, timeout_seconds)
    own_group = twin_of(model.process_group, seconds)
    comm = CountingComm(TorchComm(own_group, timeout_seconds=seconds))
    worker = Worker(own_group.group_name)
    try:
        engine = worker.call(lambda: _agreed_engine(groups, settings, the_rules, comm))
    except BaseException:
        worker.close()
        raise
    sieve = Sieve(engine, worker, own_group, sinks)
    sieve.stats.buffer_bytes = _buffer_bytes(model)
    feed = Feed(sieve, {tensor: name for name, tensor in parameters.items()}, scaler)
    model.register_comm_hook(feed, exchange_hook)
    Watch(model, feed)
    return sieve


def _agreed_engine(groups: tuple[Group, ...], settings: Settings, rules: Rules, comm: CountingComm) -> Engine:
    """On the worker's thread: all calls on its process group come from there."""
    device = groups[0].device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    handshake.compare(handshake.facts(groups, settings, rules), comm)
    return Engine(groups, settings, comm)


def _check_model(model: Any) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first, then attach"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__name__", "a hook")
        ours = model._comm_hooks[0][0] is exchange_hook
        raise InputError(
            "a sieve is already attached to this model: DDP takes one hook only; keep the sieve that attach gave"
            if ours
            else f"this model already has a communication hook ({hook}): DDP takes one only; wrap it anew to attach"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"module {name or 'the model itself'} is made with sparse=True, and sparse gradients cannot be "
                "exchanged here: make it with sparse=False (its gradient is selected from like any other)"
            )
    if dist.get_world_size(model.process_group) == 1:
        warnings.warn(
            "the model's process group has one rank only, so nothing is exchanged; if more were meant, start with "
            "torchrun --nproc-per-node=N",
            RuntimeWarning,
            stacklevel=3,
        )


def _buffer_bytes(model: DistributedDataParallel) -> int:
    """What DDP broadcasts before a forward pass, by itself and whole: batch norm's averages, mostly."""
    buffers: list[Tensor] = model.modules_buffers if model.broadcast_buffers else []
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Those DDP exchanges, by name, in the order they were registered."""
    ignored = set(model.parameters_to_ignore)
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored and parameter.numel()
    }
    if not found:
        raise InputError("the model has no parameters that require gradients: there is nothing to exchange")
    return found
