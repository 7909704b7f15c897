"""An engine whose groups hold residuals of updates, and whose totals move a shared model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradsieve.comm import CountingComm
from gradsieve.engine import Engine, Settings, Step
from gradsieve.engine.groups import Group
from gradsieve.errors import InputError
from gradsieve.feedback import NoFeedback, Residual
from gradsieve.pipeline import Exchanged, Pipeline, PipelineState, entries_to_keep
from gradsieve.recipes import Recipe
from gradsieve.selectors.window import Window
from gradsieve.updates.combs import Comb, CombDrift, CombPieces, CombState, TakeTurns, Turn
from gradsieve.updates.drift import Drift
from gradsieve.updates.outer import Outer
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces

PLAIN = Outer()


class UpdateEngine(Engine):
    """All groups of one model on one rank. A step that counts moves `shared` by the mean of what was delivered."""

    def __init__(
        self,
        groups: Sequence[Group],
        settings: Settings,
        comm: CountingComm,
        parameters: Mapping[str, Tensor],
        outer: Outer = PLAIN,
    ) -> None:
        super().__init__(groups, settings, comm)
        self.outer = outer
        self.local_steps_done = 0
        self.current: int | None = None  # group under way
        self.is_due = False  # whether an exchange is to come before the next forward pass; the same on all ranks
        # At least float32, as residuals are: small moves must not vanish in rounding.
        like = [self._residual(index) for index in range(len(self.groups))]
        self._shared = [torch.empty_like(vector) for vector in like]
        self.velocity = [torch.zeros_like(vector) for vector in like] if outer.momentum else []  # of the shared model
        self._moved = [] if outer.ahead else [torch.zeros_like(vector) for vector in like]  # since the last exchange
        self._pending: list[SharedPieces] = []  # groups exchanged in the step under way
        for name, parameter in parameters.items():
            self.shared[name].copy_(parameter.detach().reshape(-1))

    @property
    def shared(self) -> dict[str, Tensor]:
        """The shared model's parameters, flat, by name; the same on every rank, bit for bit."""
        return {name: self._part(self._shared, name) for name in self.positions}

    def residual(self, name: str) -> Tensor:
        """A parameter's residual on this rank, flat; changing it changes what is exchanged next."""
        index, slot = self._slot(name)
        return self._residual(index)[slot]

    def offset(self, name: str) -> Tensor:
        """The distance from a parameter's shared to its local value on this rank, flat."""
        return self.residual(name) if self.outer.ahead else self._part(self._moved, name)

    def outer_state(self) -> dict[str, dict[str, Tensor]]:
        """What the outer settings need besides residuals, by kind and parameter; empty for the default."""
        kinds = {"velocity": self.velocity, "moved": self._moved}
        return {
            kind: {name: self._part(vectors, name).clone() for name in self.positions}
            for kind, vectors in kinds.items()
            if vectors
        }

    def load_outer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `outer_state` gave."""
        for kind, vectors in (("velocity", self.velocity), ("moved", self._moved)):
            for name in self.positions if vectors else ():
                self._part(vectors, name).copy_(state[kind][name])

    def count_local_step(self) -> None:
        """One more backward pass, which a step follows. All ranks count alike, also one that skips its step."""
        self.local_steps_done += 1
        self.is_due = self.is_due or self.local_steps_done % self.outer.local_steps == 0

    def _residual(self, index: int) -> Tensor:
        return self.vectors(index)["residual"]

    def _part(self, vectors: Sequence[Tensor], name: str) -> Tensor:
        index, slot = self._slot(name)
        return vectors[index][slot]

    def _slot(self, name: str) -> tuple[int, slice]:
        """A parameter's group, and its part of the group's vector."""
        index, number = self.positions[name]
        slot = self.groups[index].slots[number]
        return index, slice(slot.start, slot.stop)

    def exchange(self, index: int, grads: Sequence[Tensor], density: float | None, withhold: bool) -> Exchanged:
        """Exchange one group's residual. The gradients, if any are given, play no part."""
        if index == 0:
            self._pending = []
        group = self.groups[index]
        if self._moved:
            self._residual(index).add_(self._moved[index])
            self._moved[index].zero_()
        pieces = SharedPieces([self._shared[index]])
        if isinstance(self.settings.recipe.feedback, CombDrift):
            selector = self.states[index].selector
            turn = selector.turn if isinstance(selector, Turn) else 0
            pieces.comb = Comb.of_turn(turn, density if group.sparse else None, self.comm.size)
            k = pieces.comb.numel(group.numel)
        else:
            k = group.numel if density is None else entries_to_keep(group.numel, density, self.comm)
        outcome = self._pipeline(group, density).exchange(pieces, k, self.states[index], pieces)
        self._pending.append(pieces)
        return outcome

    def exchange_all(self, *, joined: bool = False) -> bool:
        """One step of all groups, on the caller's thread; whether it counted, the same on every rank."""
        step = Step(self, joined=joined)
        for index in range(len(self.groups)):
            self.current = index
            step.exchange(index)
        self.current = None
        return step.finish()

    def commit(self, states: list[PipelineState]) -> None:
        """Take on the new residuals and move the shared model: all groups together, or none."""
        super().commit([_committed(state) for state in states])
        for index, pieces in enumerate(self._pending):
            if self.velocity:
                pieces.accelerate_(self.velocity[index], self.outer.momentum)
            pieces.move_(self.outer.rate)

    def _pipeline(self, group: Group, density: float | None) -> Pipeline:
        """Small parameters are exchanged whole, with a residual like all others: nothing of them is left over."""
        return self._sparse if group.sparse and density is not None else self._whole


def _committed(state: PipelineState) -> PipelineState:
    feedback = state.feedback
    return state._replace(feedback=feedback.committed()) if isinstance(feedback, CombState) else state


class SharedPieces(CombPieces):
    """A group's part of the shared model. The mean is held back until the step counts."""

    _mean: Tensor | SparseVector  # of the comb; sparse if few of its entries were delivered

    def write_mean_(self, total: SparseVector, size: int, *, is_clear: bool = False) -> None:
        """Remember the mean, in memory of its own: `total` may lie in a vector that is about to be reused."""
        if total.is_run:
            self._mean = torch.empty(total.numel, dtype=self.dtype, device=self.device)
            Pieces([self._mean]).write_mean_(total, size)
        else:
            self._mean = SparseVector.trusted((total.indices, total.values / size), total.numel)

    def accelerate_(self, velocity: Tensor, momentum: float) -> None:
        """Nesterov: velocity = momentum * velocity + mean; the mean becomes mean + momentum * velocity."""
        mean = self._mean if isinstance(self._mean, Tensor) else self._mean.to_dense()
        fast = self.comb.gathered(velocity).mul_(momentum).add_(mean)
        self.comb.put_in_(velocity, fast)
        self._mean = mean.add_(fast, alpha=momentum)

    def move_(self, rate: float) -> None:
        """Subtract the mean, times the outer rate, from the shared model."""
        ((_, _, shared, _),) = self
        if isinstance(self._mean, Tensor):
            self.comb.subtract_from_(shared, self._mean, rate)
        else:
            shared.index_add_(0, self._mean.indices, self._mean.values, alpha=-rate)


def for_updates(settings: Settings, outer: Outer = PLAIN) -> Settings:
    """The settings with the feedback of updates, or one sentence about what does not go with them."""
    if settings.local_clip_norm is not None:
        raise InputError(
            "local_clip_norm clips gradients before they are exchanged, and here updates are exchanged: "
            "clip with sieve.clip_grad_norm_(max_norm) before optimizer.step()"
        )
    recipe = settings.recipe
    if type(recipe.feedback) not in (Residual, NoFeedback):
        raise InputError(
            f"a recipe with {type(recipe.feedback).__name__} holds the optimizer's momentum, which stays in the "
            "optimizer when updates are exchanged: choose a recipe with plain error feedback"
        )
    if isinstance(recipe.selector, Window):
        made = Recipe(TakeTurns(), recipe.reducer, CombDrift(outer.decay))
    else:
        made = Recipe(recipe.selector, recipe.reducer, Drift(outer.decay))
    return replace(settings, recipe=made, withhold_unused=False)
