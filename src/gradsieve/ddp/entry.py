"""`attach`: checks the model, cuts groups, makes a process group and a worker, compares settings, adds the hook."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.ddp.advice import Advice
from gradsieve.ddp.alternating import AlternatingFeed
from gradsieve.ddp.hook import Feed, exchange_hook
from gradsieve.ddp.network import Network
from gradsieve.ddp.plain import PlainSums
from gradsieve.ddp.updates import UpdateFeed, update_hook
from gradsieve.ddp.watch import Watch
from gradsieve.engine import Engine, Settings, handshake
from gradsieve.engine.decision import GradientDecision, other_recipes
from gradsieve.engine.groups import Group, cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.engine.scaling import Scaler, check_scaler
from gradsieve.engine.schedules import Constant, Schedule
from gradsieve.engine.warmup import rehearse_gradients, warm_up
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.reducers.dense import Dense
from gradsieve.sieve import Sieve
from gradsieve.stats.sinks import Sink
from gradsieve.updates import Outer, UpdateEngine, UpdateSieve, bind, for_updates
from gradsieve.updates.adapting import aware, checked_optimizer, owned_by, rates
from gradsieve.updates.defaults import AUTO, DEFAULT_UPDATE_RECIPE, chosen_exchange, decides, default_rules
from gradsieve.updates.engine import PLAIN
from gradsieve.updates.signal import signal_fact
from gradsieve.updates.warmup import rehearse_updates

T = TypeVar("T")

DEFAULT_GROUP_MB = 25.0
DEFAULT_CHECK_REPLICAS_EVERY = 100


def attach(
    model: DistributedDataParallel,
    recipe: str | Recipe | None = AUTO,
    *,
    density: float | Schedule | None = None,
    optimizer: Optimizer | None = None,
    local_steps: int | None = None,
    outer: Outer | None = None,
    adapt: bool = True,
    rules: Rules | None = None,
    group_mb: float | None = DEFAULT_GROUP_MB,
    scaler: Scaler | None = None,
    local_clip_norm: float | None = None,
    check_replicas_every: int = DEFAULT_CHECK_REPLICAS_EVERY,
    timeout_seconds: float | None = None,
    sinks: Sequence[Sink] = (),
) -> Sieve:
    """Exchange the gradients of a DDP model, or its optimizer's updates, sparsely from the next backward pass on.

    All ranks call it together. With `optimizer`, each rank steps on its own gradient, and the ranks exchange the
    optimizer's updates (see `gradsieve.updates`). This is what Adam needs. A torch AdamW, Adam or SGD becomes its
    counterpart in `gradsieve`, in place (see `Sieve.adapt`). Without `optimizer`, gradients are exchanged before the
    optimizer sees them.

    Args:
        model: The model, wrapped in `DistributedDataParallel`.
        recipe: What to send and how to sum it, by name or as a `Recipe`. "auto", the default, decides from measured
            step times: for updates between "onebit" and dense gradients, for gradients between "oktopk", "topka" and
            dense. With "onebit", Adam's updates have one step size per message, those of other optimizers one per
            1,024 entries.
        density: Fraction of the entries to send per step, or a schedule of it. The default for updates is 0.5.
            Gradients have no default.
        optimizer: The optimizer that trains this model. If given, its updates are exchanged.
        local_steps: Optimizer steps per exchange; None is 1. More sends less. Updates only.
        outer: How the shared model follows the delivered mean (DiLoCo, SparseLoCo); None moves it by that mean.
            Updates only.
        adapt: Whether to call `sieve.adapt(optimizer)` at once. Updates only.
        rules: Which parameters are sent whole. None is biases, norms and small tensors, and no parameter with the
            default recipe for Adam's updates.
        group_mb: The largest group in MB. Entries are selected from one group at a time. None is one group for the
            whole model, as in the papers: nothing then overlaps with backward.
        scaler: The `GradScaler` in use, if any. Updates do not need it.
        local_clip_norm: Clip each rank's gradient to this norm before it is added to the residual, as in DGC.
            Gradients only.
        check_replicas_every: Steps between comparisons of all ranks' parameters; 0 is never.
        timeout_seconds: How long to wait for a peer; None is the timeout of the model's process group.
        sinks: They get the statistics of every step.

    Returns:
        The handle: statistics, checkpoints, dense phases, clipping. If updates are exchanged, call its `exchange()`
        after the last step of training.

    Raises:
        InputError: An argument is not allowed.
        MismatchError: The ranks have different settings or models.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        >>> sieve.exchange()
        >>> sieve.stats.steps
        3
    """
    _check_model(model)
    check_scaler(scaler)
    parameters = _parameters(model)
    given = optimizer  # which may be a framework's wrapper
    if optimizer is not None:
        optimizer = checked_optimizer(optimizer, parameters)
        parameters = owned_by(optimizer, parameters)
    chosen, schedule = chosen_exchange(recipe, density, optimizer)
    the_rules = rules or default_rules(chosen, optimizer)
    groups = cut_into_groups(
        parameters, the_rules, group_mb, None if optimizer is None else rates(optimizer, parameters)
    )
    unused = bool(model.find_unused_parameters or model.static_graph)
    the_outer = _outer(optimizer, local_steps, outer)
    chooses = decides(recipe) and dist.get_world_size(model.process_group) > 1
    settings = Settings(chosen, schedule, local_clip_norm, check_replicas_every, unused)
    if optimizer is not None:
        settings = for_updates(settings, the_outer)
        chooses = chooses and the_outer == PLAIN and not unused  # dense gradients are exchanged at every step
    elif chooses:
        settings = replace(settings, others=other_recipes())
    warm_up(groups, settings, rehearse_gradients if optimizer is None else rehearse_updates)
    network = Network.twin(model.process_group, timeout_seconds)
    facts = {**handshake.facts(groups, settings, the_rules), "outer": repr(the_outer), **signal_fact(optimizer)}
    facts["automatic choice"] = repr(chooses)
    network.agree(groups[0].device, facts)
    exchanged = _Exchanged(model, parameters, groups, settings, network, sinks)
    feed: Feed | UpdateFeed
    if optimizer is None:
        sieve, feed = _attach_gradients(exchanged, scaler, chooses)
    else:
        sieve, feed = _attach_updates(exchanged, optimizer, the_outer, chooses)
        if adapt:
            aware(given, network.comm.size)
    sieve.stats.buffer_bytes = _buffer_bytes(model)
    Watch(model, feed)
    return sieve


class _Exchanged(NamedTuple):
    """What is exchanged, how, and over which network."""

    model: DistributedDataParallel
    parameters: dict[str, Tensor]
    groups: Sequence[Group]
    settings: Settings
    network: Network
    sinks: Sequence[Sink]

    @property
    def names(self) -> dict[Tensor, str]:
        return {tensor: name for name, tensor in self.parameters.items()}


def _attach_gradients(what: _Exchanged, scaler: Scaler | None, chooses: bool) -> tuple[Sieve, Feed]:
    model, parameters, groups, settings, network, sinks = what
    engine = network.call(lambda: Engine(groups, settings, network.comm))
    sieve = Sieve(engine, *network.ends, sinks, parameters.values())
    if network.comm.size > 1 and _sends_less(settings):
        advice = Advice(parameters[name] for group in groups if group.sparse for name in group.names)
        weakref.finalize(sieve, advice.close)
    if chooses:
        decision = network.call(lambda: GradientDecision(engine))
        engine.decide_by(decision)
        feed = Feed(sieve, what.names, scaler, decision, PlainSums(model.process_group, network.timeout_seconds))
    else:
        feed = Feed(sieve, what.names, scaler)
    model.register_comm_hook(feed, exchange_hook)
    return sieve, feed


def _attach_updates(what: _Exchanged, optimizer: Optimizer, outer: Outer, chooses: bool) -> tuple[Sieve, UpdateFeed]:
    model, parameters, groups, settings, network, sinks = what
    engine = network.call(lambda: UpdateEngine(groups, settings, network.comm, parameters, outer))
    sieve = UpdateSieve(engine, *network.ends, sinks)
    sieve.follow(parameters, optimizer)
    if chooses:
        decision = network.call(lambda: sieve.choose(DEFAULT_UPDATE_RECIPE))
        sums = PlainSums(model.process_group, network.timeout_seconds)
        feed: UpdateFeed = AlternatingFeed(sieve, what.names, decision, sums)
    else:
        feed = UpdateFeed(sieve, what.names)
    bind(model.module, optimizer, sieve.local, feed.exchange)
    if isinstance(feed, AlternatingFeed):
        feed.follow(optimizer)
    model.register_comm_hook(feed, update_hook)
    return sieve, feed


def _outer(optimizer: Optimizer | None, local_steps: int | None, outer: Outer | None) -> Outer:
    if optimizer is None and (local_steps, outer) != (None, None):
        raise InputError("local_steps and outer are for the exchange of updates: give the optimizer as well")
    return (outer or Outer()).every(local_steps)


def _sends_less(settings: Settings) -> bool:
    """Whether any step leaves entries in the residual."""
    everything = settings.schedule == Constant(1.0, settings.schedule.dense_steps)
    return not isinstance(settings.recipe.reducer, Dense) and not everything


def _check_model(model: Any) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first, then attach"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__name__", "a hook")
        ours = model._comm_hooks[0][0] in (exchange_hook, update_hook)
        raise InputError(
            "a sieve is already attached to this model, and DDP takes one hook only: use the sieve it returned"
            if ours
            else f"this model already has a communication hook ({hook}), and DDP takes one: wrap it again to attach"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"module {name or 'the model itself'} is made with sparse=True, and sparse gradients cannot be "
                "exchanged here: make it with sparse=False (entries of its gradient are selected like any others)"
            )
    if dist.get_world_size(model.process_group) == 1:
        warnings.warn(
            "the model's process group has one rank only, so nothing is exchanged; to use N ranks, start with "
            "torchrun --nproc-per-node=N",
            RuntimeWarning,
            stacklevel=3,
        )


def _buffer_bytes(model: DistributedDataParallel) -> int:
    """Return the bytes that DDP itself broadcasts before each forward pass: mostly averages of batch norm."""
    buffers: list[Tensor] = model.modules_buffers if model.broadcast_buffers else []
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP exchanges, by name, in the order of their registration."""
    ignored = set(model.parameters_to_ignore)
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored and parameter.numel()
    }
    if not found:
        raise InputError("the model has no parameters that require gradients: there is nothing to exchange")
    return found
