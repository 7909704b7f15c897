"""The exchange that the optimizers share: named gradients become means over all ranks, on the calling thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm import Comm, CountingComm, TorchComm
from gradsieve.comm.twin import checked_timeout
from gradsieve.engine import Engine, Settings, Step, handshake
from gradsieve.engine.decision import GradientDecision, other_recipes
from gradsieve.engine.groups import Group, cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.engine.schedules import Schedule, as_schedule
from gradsieve.engine.start import START, begin_alike
from gradsieve.engine.warmup import Rehearsal, rehearse_gradients, warm_up
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.sieve import Sieve
from gradsieve.stats.sinks import Sink

STATE_KEY = "gradsieve"


class Options(TypedDict, total=False):
    """Keyword arguments of all optimizers, described at `DistributedOptimizer`. The same on all ranks."""

    rules: Rules | None
    group_mb: float | None
    local_clip_norm: float | None
    comm: Comm | dist.ProcessGroup | None
    timeout_seconds: float | None
    start: str
    sinks: Sequence[Sink]


class Exchange:
    """Exchanges the gradients of one model on one rank. All ranks make it together, since it communicates."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        recipe: Recipe,
        density: float | Schedule,
        options: Options,
        *,
        chooses: bool = False,
    ) -> None:
        others = other_recipes() if chooses else ()
        settings = Settings(recipe, as_schedule(density), options.get("local_clip_norm"), others=others)
        with torch.no_grad():
            rules = options.get("rules") or Rules()
            groups, comm = agreed(parameters, settings, rules, options, rehearse_gradients)
            engine = Engine(groups, settings, comm)
            self._decision = GradientDecision(engine) if chooses and comm.size > 1 else None
            if self._decision is not None:
                engine.decide_by(self._decision)
            self.sieve = Sieve(engine, sinks=options.get("sinks", ()), parameters=parameters.values())

    def __call__(self, grads: Mapping[str, Tensor], loss_scale: float = 1.0) -> bool:
        """Overwrite flat gradients with their means. Returns whether the step counts, the same on every rank."""
        decision = self._decision
        if decision is not None:
            if decision.chooser.is_due:
                decision.compare()
            decision.apply()
            decision.begin_step()
        step = Step(self.sieve.engine, loss_scale)
        for name, grad in grads.items():
            step.deliver(name, grad)
        for index in step.ready():
            step.exchange(index)
        counted = step.finish()
        if decision is not None:
            decision.end_exposed_step()
            decision.record()
        self.sieve.report()
        return counted

    def add_state_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the state of this rank's exchange added."""
        return {**state, STATE_KEY: self.sieve.state_dict()}


def take_state_from(state: Mapping[str, Any], sieve: Sieve) -> dict[str, Any]:
    """Load the sieve's part of a state, and return the optimizer's part."""
    if STATE_KEY not in state:
        raise InputError(
            f"rank {sieve.engine.comm.rank}: the state has no residuals (no {STATE_KEY!r} in it): it was saved by "
            "another optimizer; load it into that one before wrapping it"
        )
    sieve.load_state_dict(state[STATE_KEY])
    return {key: value for key, value in state.items() if key != STATE_KEY}


def agreed(
    parameters: Mapping[str, Tensor],
    settings: Settings,
    rules: Rules,
    options: Options,
    rehearse: Rehearsal,
    kinds: Mapping[str, Hashable] | None = None,
    **facts: str,
) -> tuple[tuple[Group, ...], CountingComm]:
    """Return groups and network, after all ranks have compared settings and have the same parameters."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}; allowed: {sorted(Options.__annotations__)}")
    start = options.get("start", "broadcast")
    if start not in START:
        raise InputError(f"start must be one of {', '.join(START)}, got {start!r}")
    groups = cut_into_groups(parameters, rules, options.get("group_mb"), kinds)
    warm_up(groups, settings, rehearse)
    comm = CountingComm(_network(options.get("comm"), options.get("timeout_seconds")))
    handshake.compare({**handshake.facts(groups, settings, rules), **facts}, comm)
    begin_alike(parameters, start, comm)
    return groups, comm


def flat(grad: Tensor) -> Tensor:
    """Return a gradient as a vector: a view if it is contiguous, otherwise a copy."""
    return grad.detach().reshape(-1)


def check_dense(name: str, grad: Tensor, rank: int) -> None:
    """Raise if a gradient is a sparse tensor."""
    if grad.layout != torch.strided:
        raise InputError(
            f"rank {rank}: parameter {name} has a sparse gradient, which cannot be exchanged: "
            "make its embedding with sparse=False"
        )


def _network(comm: Comm | dist.ProcessGroup | None, timeout_seconds: float | None) -> Comm:
    if isinstance(comm, Comm):
        if timeout_seconds is not None:
            raise InputError("timeout_seconds is for a process group; a Comm has its own timeout")
        return comm
    group = TorchComm(comm).group
    return TorchComm(group, timeout_seconds=checked_timeout(group, timeout_seconds))
