"""The heart of every way in: groups of parameters, what each remembers, and steps that count for all or for none.

A step goes: gradients are delivered parameter by parameter, in any order; a group that is complete is exchanged, groups
always in the same order; at the end either all groups take on their new state or, if anything delivered was not
finite, none does. All ranks see the same totals, so all decide alike without another message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm import CountingComm
from gradsieve.errors import InputError
from gradsieve.groups import Group
from gradsieve.kernels import kernels
from gradsieve.pieces import Pieces
from gradsieve.pipeline import Exchanged, Pipeline, PipelineState, entries_to_keep
from gradsieve.recipes import DenseRecipe, Recipe
from gradsieve.reducers.dense import Dense
from gradsieve.schedules import Schedule
from gradsieve.selectors import Everything
from gradsieve.stats import Stats, StepStats
from gradsieve.timing import Clock, TimedPipeline

LOOKED_AT_FIRST = 64  # entries of a gradient that tell, nearly always, that it is not all zero


@dataclass(frozen=True)
class Settings:
    """How gradients are exchanged."""

    recipe: Recipe
    schedule: Schedule
    local_clip_norm: float | None = None  # DGC: clip each rank's own gradient to this times size^-1/2; lower clips more
    check_replicas_every: int = 0  # steps between comparisons of all parameters; fewer finds drift sooner, 0 never
    withhold_unused: bool = False  # what is owed to a parameter waits while its gradient is all zero on this rank

    def __post_init__(self) -> None:
        if self.local_clip_norm is not None and not self.local_clip_norm > 0:
            raise InputError(f"local_clip_norm must be positive, got {self.local_clip_norm}")
        if self.check_replicas_every < 0:
            raise InputError(f"check_replicas_every must not be negative, got {self.check_replicas_every}")


class Engine:
    """All groups of one model on one rank. All ranks make the object together: it communicates."""

    def __init__(self, groups: Sequence[Group], settings: Settings, comm: CountingComm) -> None:
        self.groups = tuple(groups)
        self.settings = settings
        self.comm = comm
        self.clock = Clock()
        self.steps_done = 0  # that counted: the schedule's clock
        self.loss_scale: float | None = None  # the unit of all residuals; None before the first step
        self.dense_steps_left = 0.0  # infinite: until told otherwise
        self._sparse = TimedPipeline(settings.recipe, comm, self.clock)
        # The same feedback, so that a dense step delivers what is owed as well.
        everything = Recipe(Everything(), Dense(), settings.recipe.feedback)
        self._whole = TimedPipeline(everything, comm, self.clock)
        self._dense = TimedPipeline(DenseRecipe(), comm, self.clock)
        self.states = [self._pipeline(group, 1.0).init(_blank(group)) for group in self.groups]
        self.places = {
            slot.name: (index, number)
            for index, group in enumerate(self.groups)
            for number, slot in enumerate(group.slots)
        }
        self.sparse_numel = sum(group.numel for group in self.groups if group.sparse)
        dense_bytes = sum(group.numel * group.dtype.itemsize for group in self.groups)
        self.dense_bytes = 2 * (comm.size - 1) * dense_bytes // comm.size
        comm.reset()  # what it took to get here is part of no step
        self.clock.take()
        self.stats = Stats(traffic=comm.traffic)

    def begin(self, loss_scale: float | None = None, *, joined: bool = False, withhold: bool = False) -> Step:
        """Start a step whose gradients are `loss_scale` times as large as the loss says; None is as before.

        `joined`: this rank's inputs have ended and its gradients are zero; it delivers what it still owes, but for
        `withhold`, with which parameters whose gradient is all zero keep what they are owed.
        """
        scale = loss_scale or self.loss_scale or 1.0
        if self.loss_scale is not None and self.loss_scale != scale:
            self._rescale(scale / self.loss_scale)
        self.loss_scale = scale
        return Step(self, joined, withhold or self.settings.withhold_unused)

    def densities(self) -> list[float | None]:
        """Of each group in the step to come; None is dense."""
        scheduled = None if self.dense_steps_left > 0 else self.settings.schedule.density_at(self.steps_done)
        if scheduled is None:
            return [None] * len(self.groups)
        return [(group.density or scheduled) if group.sparse else None for group in self.groups]

    def vectors(self, index: int) -> dict[str, Tensor]:
        """What a group remembers of each entry, by name."""
        return self._pipeline(self.groups[index], 1.0).recipe.feedback.vectors(self.states[index].feedback)

    def fresh_state(self, index: int) -> PipelineState:
        """A group's state with the vectors it has, and everything else as before the first step."""
        recipe, numel = self._pipeline(self.groups[index], 1.0).recipe, self.groups[index].numel
        selector, reducer = recipe.selector.init(numel), recipe.reducer.start(numel, self.comm)
        return PipelineState(self.states[index].feedback, selector, reducer)

    def exchange(self, index: int, grads: Sequence[Tensor], density: float | None, withhold: bool) -> Exchanged:
        """Exchange one group, given its parameters' flat gradients in order, which become the means."""
        group = self.groups[index]
        if group.sparse and self.settings.local_clip_norm is not None:
            self._clip_(group, grads)
        pieces = Pieces(grads, [group.sparse and withhold and _all_zero(grad) for grad in grads])
        k = group.numel if density is None else entries_to_keep(group.numel, density, self.comm)
        return self._pipeline(group, density).exchange(pieces, k, self.states[index], pieces)

    def commit(self, states: list[PipelineState]) -> None:
        """Take on the groups' new states: the step counts."""
        self.states = states
        self.steps_done += 1
        self.dense_steps_left = max(0.0, self.dense_steps_left - 1)

    def _pipeline(self, group: Group, density: float | None) -> Pipeline:
        if not group.sparse:
            return self._dense
        return self._whole if density is None else self._sparse

    def _clip_(self, group: Group, grads: Sequence[Tensor]) -> None:
        """A group has its share of the limit: the whole gradient is known only when backward has ended."""
        assert self.settings.local_clip_norm is not None
        share = math.sqrt(group.numel / (self.sparse_numel * self.comm.size))
        limit = self.settings.local_clip_norm * (self.loss_scale or 1.0) * share
        # Parameter by parameter and in double precision: the same whatever buckets they lie in.
        norm = math.sqrt(sum(map(_squares, grads)))
        if math.isfinite(norm) and norm > limit:
            for grad in grads:
                grad.mul_(limit / norm)

    def _rescale(self, factor: float) -> None:
        recipe = self.settings.recipe
        for index, group in enumerate(self.groups):
            if group.sparse:
                feedback, selector, reducer = self.states[index]
                recipe.feedback.rescale_(feedback, factor)
                self.states[index] = PipelineState(
                    feedback, recipe.selector.rescaled(selector, factor), recipe.reducer.rescaled(reducer, factor)
                )


class Step:
    """One step under way. `deliver` and `ready` are called by one thread, `exchange` and `finish` by one thread."""

    def __init__(self, engine: Engine, joined: bool, withhold: bool) -> None:
        self._engine = engine
        self._joined = joined
        self._withhold = withhold
        self._densities = engine.densities()
        self._grads: list[dict[int, Tensor]] = [{} for _ in engine.groups]
        self._started = 0  # groups that `ready` has named
        self._outcomes: list[Exchanged] = []
        self._traffic_before = replace(engine.comm.traffic)

    def deliver(self, name: str, grad: Tensor) -> int:
        """A parameter's flat gradient, to be overwritten with the mean; the number of its group comes back."""
        index, number = self._engine.places[name]
        self._grads[index][number] = grad
        return index

    def ready(self) -> list[int]:
        """The groups that have become complete, and whose turn it is."""
        first = self._started
        groups = self._engine.groups
        while self._started < len(groups) and len(self._grads[self._started]) == len(groups[self._started].slots):
            self._started += 1
        return list(range(first, self._started))

    def exchange(self, index: int) -> None:
        """Exchange a group that `ready` has named; each once, in that order."""
        grads, clock = self._grads[index], self._engine.clock
        ordered = [grads[number] for number in range(len(grads))]
        before = clock.enter("select")
        try:
            self._outcomes.append(self._engine.exchange(index, ordered, self._densities[index], self._withhold))
        finally:
            clock.enter(before)

    def finish(self) -> bool:
        """After all groups: take on their new states, or none. Whether the step counted, the same on every rank."""
        engine = self._engine
        counted = all(outcome.finite for outcome in self._outcomes)
        engine.stats.record(self._stats(counted))
        if counted:
            engine.commit([outcome.state for outcome in self._outcomes])
        return counted

    def _stats(self, counted: bool) -> StepStats:
        engine = self._engine
        pairs = zip(engine.groups, self._outcomes, strict=True)
        sparse = [outcome for group, outcome in pairs if group.sparse and counted]
        return StepStats(
            step=engine.steps_done,
            counted=counted,
            joined=self._joined,
            dense=all(density is None for density in self._densities),
            sparse_numel=engine.sparse_numel,
            selected_entries=sum(outcome.num_local for outcome in sparse),
            delivered_entries=sum(outcome.num_total for outcome in sparse),
            dense_bytes=engine.dense_bytes,
            traffic=engine.comm.traffic.since(self._traffic_before),
            seconds=engine.clock.take(),
        )


def _blank(group: Group) -> Pieces:
    """Something with the shape of the group's gradient, in next to no memory."""
    return Pieces([torch.empty(1, dtype=group.dtype, device=group.device).expand(group.numel)])


def _squares(grad: Tensor) -> float:
    """Their sum. A norm that torch is told to take in double precision would copy the gradient for it."""
    mean, deviation = kernels(grad).moments(grad)
    return grad.numel() * (mean**2 + deviation**2)


def _all_zero(grad: Tensor) -> bool:
    return not bool(grad[:LOOKED_AT_FIRST].any()) and not bool(grad.any())
