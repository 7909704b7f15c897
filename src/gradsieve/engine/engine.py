"""The core of every entry point: groups of parameters, their states, and steps that count for all groups or for none.

1. Gradients arrive parameter by parameter, in any order.
2. A complete group is exchanged. Groups are always exchanged in the same order.
3. At the end all groups take their new state. If a delivered entry was not finite, no group does.
All ranks see the same totals, so they decide alike without another message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.auto import Decision
from gradsieve.comm import CountingComm
from gradsieve.engine.groups import Group
from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.kernels import kernels
from gradsieve.pipeline import Exchanged, Pipeline, PipelineState, entries_to_keep
from gradsieve.recipes import RECIPES, Recipe
from gradsieve.reducers.dense import Dense
from gradsieve.selectors import Everything
from gradsieve.stats import Stats
from gradsieve.stats.figures import Seconds, StepStats
from gradsieve.stats.timing import Clock, timed
from gradsieve.vector.pieces import Pieces

LOOKED_AT_FIRST = 64  # entries of a gradient: enough to see, nearly always, that it is not all zero


@dataclass(frozen=True)
class Settings:
    """How gradients are exchanged. The same on all ranks."""

    recipe: Recipe
    schedule: Schedule
    local_clip_norm: float | None = None  # DGC: clip each rank's own gradient to this times size^-1/2; lower clips more
    check_replicas_every: int = 0  # steps between comparisons of all parameters; fewer finds drift sooner, 0 never
    withhold_unused: bool = False  # whether a parameter whose gradient is all zero on this rank keeps its residual
    others: tuple[Recipe, ...] = ()  # recipes with the same feedback, to which `Engine.use` can change

    def __post_init__(self) -> None:
        if self.local_clip_norm is not None and not self.local_clip_norm > 0:
            raise InputError(f"local_clip_norm must be positive, got {self.local_clip_norm}")
        if self.check_replicas_every < 0:
            raise InputError(f"check_replicas_every must not be negative, got {self.check_replicas_every}")


class Engine:
    """All groups of one model on one rank. All ranks make it together, since it communicates."""

    def __init__(self, groups: Sequence[Group], settings: Settings, comm: CountingComm) -> None:
        self.groups = tuple(groups)
        self.settings = settings
        self.comm = comm
        self.clock = Clock()
        self.steps_done = 0  # steps that counted: the schedule's clock
        self.loss_scale: float | None = None  # the unit of all residuals; None before the first step
        self.dense_steps_left = 0.0  # infinity: until `go_dense` is called again
        self.recipes = (settings.recipe, *settings.others)
        self.number = 0  # of the recipe in use
        self.uses_dense = False  # whether all entries are sent, until `use` is called
        self._is_clear = False  # while they are: whether all residuals are zero on all ranks
        self.decision: Decision | None = None  # between the recipes and dense
        self._sparse = Pipeline(timed(settings.recipe, self.clock), comm)
        # The same feedback, so that a dense step delivers the residual as well.
        everything = Recipe(Everything(), Dense(), settings.recipe.feedback)
        self._whole = Pipeline(timed(everything, self.clock), comm)
        self._dense = Pipeline(timed(RECIPES["dense"](), self.clock), comm)
        kept_whole = self._dense.recipe
        self._stateless = PipelineState(  # of all groups that are sent without feedback
            kept_whole.feedback.init(Pieces([torch.empty(1)])),
            kept_whole.selector.init(1),
            kept_whole.reducer.start(1, comm),
        )
        self.states = [self._pipeline(group, 1.0).init(_blank(group)) for group in self.groups]
        self.positions = {  # of each parameter: its group, and its number in the group
            slot.name: (index, number)
            for index, group in enumerate(self.groups)
            for number, slot in enumerate(group.slots)
        }
        self.sparse_numel = sum(group.numel for group in self.groups if group.sparse)
        dense_bytes = sum(group.numel * group.dtype.itemsize for group in self.groups)
        self.dense_bytes = 2 * (comm.size - 1) * dense_bytes // comm.size
        comm.reset()  # the traffic of the setup belongs to no step
        self.clock.take()
        self.stats = Stats(traffic=comm.traffic)

    def scale_to(self, loss_scale: float | None) -> None:
        """Rescale all states: gradients are multiplied by `loss_scale` from now on. None keeps the last scale."""
        scale = loss_scale or self.loss_scale or 1.0
        if self.loss_scale is not None and self.loss_scale != scale:
            self._rescale(scale / self.loss_scale)
        self.loss_scale = scale

    def densities(self) -> list[float | None]:
        """Return the density of each group in the next step; None is dense."""
        scheduled = None if self.sends_all else self.settings.schedule.density_at(self.steps_done)
        if scheduled is None or self.uses_dense:
            return [None] * len(self.groups)
        return [(group.density or scheduled) if group.sparse else None for group in self.groups]

    @property
    def sends_all(self) -> bool:
        """Whether the next step sends all entries, because the user or the schedule says so."""
        return self.dense_steps_left > 0 or self.settings.schedule.density_at(self.steps_done) is None

    def vectors(self, index: int) -> dict[str, Tensor]:
        """Return the vectors that a group's feedback keeps, by name."""
        return self._pipeline(self.groups[index], 1.0).recipe.feedback.vectors(self.states[index].feedback)

    def fresh_state(self, index: int) -> PipelineState:
        """Return a group's state with its present vectors, and everything else as before the first step."""
        recipe, numel = self._pipeline(self.groups[index], 1.0).recipe, self.groups[index].numel
        selector, reducer = recipe.selector.init(numel), recipe.reducer.start(numel, self.comm)
        return PipelineState(self.states[index].feedback, selector, reducer)

    def exchange(self, index: int, grads: Sequence[Tensor], density: float | None, withhold: bool) -> Exchanged:
        """Exchange one group. `grads` are its parameters' flat gradients in order; the means overwrite them."""
        group = self.groups[index]
        if group.sparse and self.settings.local_clip_norm is not None:
            with self.clock.phase("select"):
                self._clip_(group, grads)
        pieces = Pieces(grads, [group.sparse and withhold and _all_zero(grad) for grad in grads])
        k = group.numel if density is None else entries_to_keep(group.numel, density, self.comm)
        if group.sparse and self.uses_dense and self._is_clear and not self.sends_all:
            return self._dense.exchange(pieces, k, self._stateless, pieces)._replace(state=self.states[index])
        return self._pipeline(group, density).exchange(pieces, k, self.states[index], pieces)

    def commit(self, states: list[PipelineState]) -> None:
        """Take the new states of all groups: the step counts."""
        self.states = states
        self.steps_done += 1
        self.dense_steps_left = max(0.0, self.dense_steps_left - 1)

    def restore(
        self, states: list[PipelineState], steps_done: int, loss_scale: float | None, dense_steps_left: float
    ) -> None:
        """Continue from a checkpoint."""
        self.states = states
        self.steps_done, self.loss_scale, self.dense_steps_left = steps_done, loss_scale, dense_steps_left

    def decide_by(self, decision: Decision) -> None:
        """Let checkpoints include a decision, which calls `use` and `use_dense`."""
        self.decision = decision

    def use(self, number: int) -> None:
        """Exchange by this one of the recipes from the next step on. Residuals stay."""
        self.uses_dense = False
        if number != self.number:
            self.number = number
            self._sparse = Pipeline(timed(self.recipes[number], self.clock), self.comm)
            for index, group in enumerate(self.groups):
                if group.sparse:
                    self.states[index] = self.fresh_state(index)

    def use_dense(self, *, is_clear: bool = False) -> None:
        """Send all entries, including the residual, from the next step on. `is_clear`: no rank has a residual."""
        self.uses_dense, self._is_clear = True, is_clear

    def count_dense_step(self, wait_seconds: float) -> None:
        """Count a step in which DDP's own process group has summed all gradients."""
        before = replace(self.comm.traffic)
        for group in self.groups:
            self.comm.count_all_reduce(group.numel * group.dtype.itemsize)
        self.stats.record(
            StepStats(
                step=self.steps_done,
                counted=True,
                joined=False,
                dense=True,
                sparse_numel=self.sparse_numel,
                selected_entries=self.sparse_numel,
                delivered_entries=self.sparse_numel,
                dense_bytes=self.dense_bytes,
                traffic=self.comm.traffic.since(before),
                seconds=Seconds(communicate=wait_seconds),
            )
        )
        Engine.commit(self, self.states)

    def go_dense(self, steps: float) -> None:
        """Send all entries for this number of steps. Infinity is until the next call, 0 is sparse again."""
        self.dense_steps_left = steps

    def _pipeline(self, group: Group, density: float | None) -> Pipeline:
        if not group.sparse:
            return self._dense
        return self._whole if density is None else self._sparse

    def _clip_(self, group: Group, grads: Sequence[Tensor]) -> None:
        """Clip to the group's share of the limit: the norm of all gradients is known only after backward."""
        assert self.settings.local_clip_norm is not None
        share = math.sqrt(group.numel / (self.sparse_numel * self.comm.size))
        limit = self.settings.local_clip_norm * (self.loss_scale or 1.0) * share
        # Per parameter and in double precision, so that the result does not depend on the buckets.
        norm = math.sqrt(sum(map(_squares, grads)))
        if math.isfinite(norm) and norm > limit:
            for grad in grads:
                grad.mul_(limit / norm)

    def _rescale(self, factor: float) -> None:
        recipe = self.recipes[self.number]
        for index, group in enumerate(self.groups):
            if group.sparse:
                feedback, selector, reducer = self.states[index]
                recipe.feedback.rescale_(feedback, factor)
                self.states[index] = PipelineState(
                    feedback, recipe.selector.rescaled(selector, factor), recipe.reducer.rescaled(reducer, factor)
                )


def _blank(group: Group) -> Pieces:
    """Return one entry expanded to the length of the group's gradient: nearly no memory."""
    return Pieces([torch.empty(1, dtype=group.dtype, device=group.device).expand(group.numel)])


def _squares(grad: Tensor) -> float:
    """Return the sum of squares, in double precision without a copy, which torch's norms would make."""
    mean, deviation = kernels(grad).moments(grad)
    return grad.numel() * (mean**2 + deviation**2)


def _all_zero(grad: Tensor) -> bool:
    return not bool(grad[:LOOKED_AT_FIRST].any()) and not bool(grad.any())
