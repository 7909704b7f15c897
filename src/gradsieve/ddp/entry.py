"""`attach`: checks, groups, a process group and a thread of our own, a handshake, and the hook is in."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.comm import CountingComm, TorchComm
from gradsieve.comm.twin import checked_timeout, twin_of
from gradsieve.ddp.advice import Advice
from gradsieve.ddp.hook import Feed, exchange_hook
from gradsieve.ddp.updates import UpdateFeed, update_hook
from gradsieve.ddp.watch import Watch
from gradsieve.engine import Engine, Settings, handshake
from gradsieve.engine.groups import cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.engine.scaling import Scaler, check_scaler
from gradsieve.engine.schedules import Constant, Schedule
from gradsieve.engine.worker import Worker
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.reducers.dense import Dense
from gradsieve.sieve import Sieve
from gradsieve.stats.sinks import Sink
from gradsieve.updates import Outer, UpdateEngine, UpdateSieve, bind, for_updates
from gradsieve.updates.adapting import aware, checked_optimizer, owned_by, rates
from gradsieve.updates.defaults import chosen_exchange, default_rules

T = TypeVar("T")

DEFAULT_GROUP_MB = 25.0
DEFAULT_CHECK_REPLICAS_EVERY = 100


def attach(
    model: DistributedDataParallel,
    recipe: str | Recipe | None = None,
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
    """Have a DDP model's gradients, or its optimizer's updates, exchanged sparsely from its next backward pass on.

    All ranks call it together. With `optimizer`, every rank steps on its own gradient and the ranks exchange what the
    optimizer did (see `gradsieve.updates`): this is what Adam needs. A torch AdamW, Adam or SGD is turned into
    gradsieve's own in place (see `Sieve.adapt`). Without it, gradients are exchanged before the optimizer sees them.

    Args:
        model: The wrapped model.
        recipe: What to send and how to sum it; `"onebit"` for updates and `"oktopk"` for gradients if not given.
            With `"onebit"`, updates of Adam have one step size per message, those of other optimizers one per 1,024
            entries.
        density: Fraction of entries to send per step, or a schedule of it. Updates have a default, 0.5.
        optimizer: The optimizer that trains this model; given, updates are exchanged.
        local_steps: Optimizer steps from exchange to exchange; 1 if not given. Updates only.
        outer: How the shared model follows the delivered mean (DiLoCo, SparseLoCo); plainly if not given. Updates only.
        adapt: Whether `sieve.adapt(optimizer)` is done at once. Updates only.
        rules: Which parameters are exchanged whole. If not given: biases, norms and small tensors, and none with the
            default recipe for Adam's updates.
        group_mb: The most that is selected from and sent as one. None is the whole model, as in the papers, and leaves
            nothing to overlap with backward.
        scaler: The `GradScaler` in use, if any. Updates do not need it.
        local_clip_norm: Clips each rank's gradient before it is added to the residual, as DGC does. Gradients only.
        check_replicas_every: Steps between comparisons of all ranks' parameters; 0 is never.
        timeout_seconds: How long to wait for a peer; that of the model's process group if not given.
        sinks: They get the figures of every step.

    Returns:
        The handle: statistics, saving and loading, dense phases.

    Raises:
        InputError: An argument does not fit.
        MismatchError: Ranks are set up differently.
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
    settings = Settings(chosen, schedule, local_clip_norm, check_replicas_every, unused)
    the_outer = _outer(optimizer, local_steps, outer)
    if optimizer is not None:
        settings = for_updates(settings, the_outer)
    network = _Network.twin(model.process_group, timeout_seconds)
    network.agree(groups[0].device, {**handshake.facts(groups, settings, the_rules), "outer": repr(the_outer)})
    names = {tensor: name for name, tensor in parameters.items()}
    if optimizer is None:
        made = network.engine(lambda: Engine(groups, settings, network.comm))
        sieve = Sieve(made, *network.ends, sinks, parameters.values())
        if network.comm.size > 1 and _sends_less(settings):
            advice = Advice(parameters[name] for group in groups if group.sparse for name in group.names)
            weakref.finalize(sieve, advice.close)
        feed: Feed | UpdateFeed = Feed(sieve, names, scaler)
        model.register_comm_hook(feed, exchange_hook)
    else:
        engine = network.engine(lambda: UpdateEngine(groups, settings, network.comm, parameters, the_outer))
        sieve = UpdateSieve(engine, *network.ends, sinks)
        sieve.follow(parameters, optimizer)
        if adapt and given is not None:
            aware(given, network.comm.size)
        feed = UpdateFeed(sieve, names)
        bind(model.module, optimizer, sieve.local, feed.exchange)
        model.register_comm_hook(feed, update_hook)
    sieve.stats.buffer_bytes = _buffer_bytes(model)
    Watch(model, feed)
    return sieve


def _outer(optimizer: Optimizer | None, local_steps: int | None, outer: Outer | None) -> Outer:
    if optimizer is None and (local_steps, outer) != (None, None):
        raise InputError("local_steps and outer go with the exchange of updates: give the optimizer as well")
    return (outer or Outer()).every(local_steps)


class _Network(NamedTuple):
    """A process group, a comm and a thread of our own. All calls on the group come from that thread."""

    group: dist.ProcessGroup
    comm: CountingComm
    worker: Worker

    @classmethod
    def twin(cls, group: dist.ProcessGroup, timeout_seconds: float | None) -> _Network:
        seconds = checked_timeout(group, timeout_seconds)
        own = twin_of(group, seconds)
        return cls(own, CountingComm(TorchComm(own, timeout_seconds=seconds)), Worker(own.group_name))

    @property
    def ends(self) -> tuple[Worker, dist.ProcessGroup]:
        return self.worker, self.group

    def agree(self, device: torch.device, facts: Mapping[str, str]) -> None:
        def compare() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            handshake.compare(facts, self.comm)

        self._call(compare)

    def engine(self, make: Callable[[], Engine]) -> Engine:
        return self._call(make)

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return self.worker.call(work)
        except BaseException:
            self.worker.close()
            raise


def _sends_less(settings: Settings) -> bool:
    """Whether any step leaves entries behind."""
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
