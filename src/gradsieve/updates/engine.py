"""An engine whose groups hold residuals of updates, and whose totals move a shared model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradsieve.comm import CountingComm
from gradsieve.engine import Engine, Settings
from gradsieve.errors import InputError
from gradsieve.feedback import NoFeedback, Residual
from gradsieve.groups import Group
from gradsieve.pieces import Piece, Pieces
from gradsieve.pipeline import Exchanged, Pipeline, PipelineState, entries_to_keep
from gradsieve.recipes import Recipe
from gradsieve.updates.drift import Drift
from gradsieve.updates.outer import Outer
from gradsieve.vector import SparseVector

PLAIN = Outer()


class UpdateEngine(Engine):
    """All groups of one model on one rank. A step that counts moves `shared` by the mean of what was delivered."""

    def __init__(
        self,
        groups: Sequence[Group],
        settings: Settings,
        comm: CountingComm,
        shared: Mapping[str, Tensor],
        outer: Outer = PLAIN,
    ) -> None:
        super().__init__(groups, settings, comm)
        self.shared = shared  # flat, by name; the same on every rank, bit for bit
        self.outer = outer
        self.local_steps_done = 0
        self.is_due = False  # whether an exchange is to come before the next forward pass; the same on all ranks
        like = [state.feedback.residual for state in self.states]
        self.velocity = [torch.zeros_like(vector) for vector in like] if outer.momentum else []  # as `shared`
        self._moved = [] if outer.ahead else [torch.zeros_like(vector) for vector in like]  # since the last exchange
        self._pending: list[SharedPieces] = []  # groups exchanged in the step under way

    def residual(self, name: str) -> Tensor:
        """A parameter's residual on this rank, flat; changing it changes what is exchanged next."""
        return self._part([state.feedback.residual for state in self.states], name)

    def offset(self, name: str) -> Tensor:
        """The distance from a parameter's shared to its local value on this rank, flat."""
        return self.residual(name) if self.outer.ahead else self._part(self._moved, name)

    def outer_state(self) -> dict[str, Tensor]:
        """The velocity of each parameter of the shared model; empty without outer momentum."""
        return {name: self._part(self.velocity, name).clone() for name in self.places} if self.velocity else {}

    def load_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `outer_state` gave."""
        for name, velocity in state.items():
            self._part(self.velocity, name).copy_(velocity)

    def count_local_step(self) -> None:
        """One more backward pass, which a step follows. All ranks count alike, also one that skips its step."""
        self.local_steps_done += 1
        self.is_due = self.is_due or self.local_steps_done % self.outer.local_steps == 0

    def _part(self, vectors: Sequence[Tensor], name: str) -> Tensor:
        index, number = self.places[name]
        slot = self.groups[index].slots[number]
        return vectors[index][slot.start : slot.stop]

    def exchange(self, index: int, grads: Sequence[Tensor], density: float | None, withhold: bool) -> Exchanged:
        """Exchange one group's residual. The gradients, if any are given, play no part."""
        if index == 0:
            self._pending = []
        group = self.groups[index]
        if self._moved:
            self.states[index].feedback.residual.add_(self._moved[index])
            self._moved[index].zero_()
        pieces = SharedPieces([self.shared[name] for name in group.names])
        k = group.numel if density is None else entries_to_keep(group.numel, density, self.comm)
        outcome = self._pipeline(group, density).exchange(pieces, k, self.states[index], pieces)
        self._pending.append(pieces)
        return outcome

    def commit(self, states: list[PipelineState]) -> None:
        """Take on the new residuals and move the shared model: all groups together, or none."""
        super().commit(states)
        for index, pieces in enumerate(self._pending):
            if self.velocity:
                pieces.accelerate_(self.velocity[index], self.outer.momentum)
            pieces.move_(self.outer.rate)

    def _pipeline(self, group: Group, density: float | None) -> Pipeline:
        """Small parameters are exchanged whole, with a residual like all others: nothing of them is left over."""
        return self._sparse if group.sparse and density is not None else self._whole


class SharedPieces(Pieces):
    """A group's part of the shared model. The mean is held back until the step counts."""

    _mean: Sequence[SparseVector] = ()  # in blocks that follow each other

    def write_mean_(self, total: SparseVector, size: int) -> None:
        """Remember the mean, in memory of its own: `total` may lie in a vector that is about to be reused."""
        if total.is_run:
            runs = [(block.values / size, block.span[0]) for block in total.blocks]
            self._mean = [SparseVector.run(values, start, total.numel) for values, start in runs]
        else:
            self._mean = [SparseVector.trusted((total.indices, total.values / size), total.numel)]

    def accelerate_(self, velocity: Tensor, momentum: float) -> None:
        """Nesterov: velocity = momentum * velocity + mean; the mean becomes mean + momentum * velocity."""
        whole = torch.zeros_like(velocity)
        for mean in self._mean:
            mean.put_in_(whole)
        velocity.mul_(momentum).add_(whole)
        self._mean = [SparseVector.full(whole.add_(velocity, alpha=momentum))]

    def move_(self, rate: float) -> None:
        """Subtract the mean, times the outer rate, from the shared model."""
        for mean in self._mean:
            for piece, part in zip(self, mean.split([0, *(piece.stop for piece in self)]), strict=True):
                _subtract_(piece, part, rate)


def _subtract_(piece: Piece, part: SparseVector, rate: float) -> None:
    if part.is_run:
        start, stop = (at - piece.start for at in part.span)
        if start < stop:
            piece.values[start:stop].sub_(part.values, alpha=rate)
    else:
        piece.values.index_add_(0, part.indices - piece.start, part.values.to(piece.values.dtype), alpha=-rate)


def for_updates(settings: Settings, outer: Outer = PLAIN) -> Settings:
    """The settings with the feedback of updates, or one sentence about what does not go with them."""
    if settings.local_clip_norm is not None:
        raise InputError(
            "local_clip_norm clips gradients before they are exchanged, and here updates are exchanged: "
            "clip with torch.nn.utils.clip_grad_norm_ before optimizer.step() as usual"
        )
    recipe = settings.recipe
    if type(recipe.feedback) not in (Residual, NoFeedback, Drift):
        raise InputError(
            f"a recipe with {type(recipe.feedback).__name__} holds the optimizer's momentum, which stays in the "
            "optimizer when updates are exchanged: choose a recipe with plain error feedback"
        )
    return replace(settings, recipe=Recipe(recipe.selector, recipe.reducer, Drift(outer.decay)), withhold_unused=False)
