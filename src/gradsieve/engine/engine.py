"""The heart of every way in: groups of parameters, what each remembers, and steps that count for all or for none.

A step goes: gradients are delivered parameter by parameter, in any order; a group that is complete is exchanged, groups
always in the same order; at the end either all groups take on their new state or, if anything delivered was not
finite, none does. All ranks see the same totals, so all decide alike without another message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
from gradsieve.stats.timing import Clock, timed
from gradsieve.vector.pieces import Pieces

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
        self._sparse = Pipeline(timed(settings.recipe, self.clock), comm)
        # The same feedback, so that a dense step delivers what is owed as well.
        everything = Recipe(Everything(), Dense(), settings.recipe.feedback)
        self._whole = Pipeline(timed(everything, self.clock), comm)
        self._dense = Pipeline(timed(RECIPES["dense"](), self.clock), comm)
        self.states = [self._pipeline(group, 1.0).init(_blank(group)) for group in self.groups]
        self.positions = {
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

    def scale_to(self, loss_scale: float | None) -> None:
        """Gradients come `loss_scale` times as large as the loss says from now on; None is as before."""
        scale = loss_scale or self.loss_scale or 1.0
        if self.loss_scale is not None and self.loss_scale != scale:
            self._rescale(scale / self.loss_scale)
        self.loss_scale = scale

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
            with self.clock.phase("select"):
                self._clip_(group, grads)
        pieces = Pieces(grads, [group.sparse and withhold and _all_zero(grad) for grad in grads])
        k = group.numel if density is None else entries_to_keep(group.numel, density, self.comm)
        return self._pipeline(group, density).exchange(pieces, k, self.states[index], pieces)

    def commit(self, states: list[PipelineState]) -> None:
        """Take on the groups' new states: the step counts."""
        self.states = states
        self.steps_done += 1
        self.dense_steps_left = max(0.0, self.dense_steps_left - 1)

    def restore(
        self, states: list[PipelineState], steps_done: int, loss_scale: float | None, dense_steps_left: float
    ) -> None:
        """Go on from a checkpoint."""
        self.states = states
        self.steps_done, self.loss_scale, self.dense_steps_left = steps_done, loss_scale, dense_steps_left

    def go_dense(self, steps: float) -> None:
        """Send everything for so many steps; infinity is until told otherwise, 0 is sparse again."""
        self.dense_steps_left = steps

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


def _blank(group: Group) -> Pieces:
    """Something with the shape of the group's gradient, in next to no memory."""
    return Pieces([torch.empty(1, dtype=group.dtype, device=group.device).expand(group.numel)])


def _squares(grad: Tensor) -> float:
    """Their sum. A norm that torch is told to take in double precision would copy the gradient for it."""
    mean, deviation = kernels(grad).moments(grad)
    return grad.numel() * (mean**2 + deviation**2)


def _all_zero(grad: Tensor) -> bool:
    return not bool(grad[:LOOKED_AT_FIRST].any()) and not bool(grad.any())
