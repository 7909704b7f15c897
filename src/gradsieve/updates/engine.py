"""An engine for updates: its groups hold residuals of updates, and its totals move a shared model."""

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
from gradsieve.updates.signal import SignalMeter
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces

PLAIN = Outer()


class UpdateEngine(Engine):
    """All groups of one model on one rank. A step that counts moves `shared` by the delivered mean."""

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
        self.current: int | None = None  # the group that is being exchanged
        self.is_due = False  # whether the next forward pass must exchange first; the same on all ranks
        self.meter: SignalMeter | None = None  # of the ranks' common signal, for optimizers that need it
        # At least float32, as residuals are: small moves must not be rounded away.
        like = [self._residual(index) for index in range(len(self.groups))]
        self._shared = [torch.empty_like(vector) for vector in like]
        self.velocity = [torch.zeros_like(vector) for vector in like] if outer.momentum else []  # of the shared model
        self._moved = [] if outer.ahead else [torch.zeros_like(vector) for vector in like]  # since the last exchange
        self._pending: list[SharedPieces] = []  # groups that the current step has exchanged
        for name, parameter in parameters.items():
            self.shared[name].copy_(parameter.detach().reshape(-1))

    @property
    def shared(self) -> dict[str, Tensor]:
        """The parameters of the shared model, flat, by name; the same on every rank, bit for bit."""
        return {name: self._part(self._shared, name) for name in self.positions}

    def residual(self, name: str) -> Tensor:
        """Return a parameter's residual on this rank, flat: a view, so that changes are exchanged next."""
        index, slot = self._slot(name)
        return self._residual(index)[slot]

    def offset(self, name: str) -> Tensor:
        """Return a parameter's shared minus its local value on this rank, flat: a view."""
        return self.residual(name) if self.outer.ahead else self._part(self._moved, name)

    def outer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of the outer settings, by kind and parameter; empty for the default."""
        kinds = {"velocity": self.velocity, "moved": self._moved}
        return {
            kind: {name: self._part(vectors, name).clone() for name in self.positions}
            for kind, vectors in kinds.items()
            if vectors
        }

    def load_outer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from what `outer_state` returned."""
        for kind, vectors in (("velocity", self.velocity), ("moved", self._moved)):
            for name in self.positions if vectors else ():
                self._part(vectors, name).copy_(state[kind][name])

    def count_local_step(self) -> None:
        """Count a backward pass, which a step follows. All ranks count alike, including one that skips its step."""
        self.local_steps_done += 1
        self.is_due = self.is_due or self.local_steps_done % self.outer.local_steps == 0

    def measure_with(self, meter: SignalMeter) -> None:
        """Exchange this meter's samples in the steps that are measured. All ranks do, or none."""
        self.meter = meter

    def sample_gradients(self) -> None:
        """Take a sample of the gradients, if the next exchange is one that measures them."""
        if self.meter is not None:
            self.meter.take(self.steps_done)

    def deliver_all(self, *, joined: bool = False) -> bool:
        """Exchange all entries of all residuals. Returns whether the step counts, the same on every rank."""
        before = self.dense_steps_left
        self.go_dense(max(1.0, before))
        counted = self.exchange_all(joined=joined)
        self.go_dense(max(0.0, before - counted))
        return counted

    def _residual(self, index: int) -> Tensor:
        return self.vectors(index)["residual"]

    def _part(self, vectors: Sequence[Tensor], name: str) -> Tensor:
        index, slot = self._slot(name)
        return vectors[index][slot]

    def _slot(self, name: str) -> tuple[int, slice]:
        """Return the number of a parameter's group, and its range in the group's vector."""
        index, number = self.positions[name]
        slot = self.groups[index].slots[number]
        return index, slice(slot.start, slot.stop)

    def exchange(self, index: int, grads: Sequence[Tensor], density: float | None, withhold: bool) -> Exchanged:
        """Exchange one group's residual. Gradients are ignored."""
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
        """Exchange all groups on the calling thread. Returns whether the step counts, the same on every rank."""
        step = Step(self, joined=joined)
        if self.meter is not None:
            with self.clock.phase("communicate"):
                self.meter.exchange(self.steps_done, self.comm)
        for index in range(len(self.groups)):
            self.current = index
            step.exchange(index)
        self.current = None
        return step.finish()

    def commit(self, states: list[PipelineState]) -> None:
        """Take the new residuals and move the shared model, all groups together."""
        super().commit([_committed(state) for state in states])
        for index, pieces in enumerate(self._pending):
            if self.velocity:
                pieces.accelerate_(self.velocity[index], self.outer.momentum)
            pieces.move_(self.outer.rate)

    def _pipeline(self, group: Group, density: float | None) -> Pipeline:
        """Dense groups have residuals as well, which are delivered whole."""
        return self._sparse if group.sparse and density is not None else self._whole


def _committed(state: PipelineState) -> PipelineState:
    feedback = state.feedback
    return state._replace(feedback=feedback.committed()) if isinstance(feedback, CombState) else state


class SharedPieces(CombPieces):
    """A group's part of the shared model. The mean is kept until the step counts."""

    _mean: Tensor | SparseVector  # of the comb; sparse if few of its entries were delivered

    def write_mean_(self, total: SparseVector, size: int, *, is_clear: bool = False) -> None:
        """Keep a copy of the mean: the memory of `total` may be reused."""
        if total.is_run:
            self._mean = torch.empty(total.numel, dtype=self.dtype, device=self.device)
            Pieces([self._mean]).write_mean_(total, size)
        else:
            self._mean = SparseVector.trusted((total.indices, total.values / size), total.numel)

    def accelerate_(self, velocity: Tensor, momentum: float) -> None:
        """Apply Nesterov momentum: velocity = momentum * velocity + mean, then mean += momentum * velocity."""
        mean = self._mean if isinstance(self._mean, Tensor) else self._mean.to_dense()
        fast = self.comb.gathered(velocity).mul_(momentum).add_(mean)
        self.comb.put_in_(velocity, fast)
        self._mean = mean.add_(fast, alpha=momentum)

    def move_(self, rate: float) -> None:
        """Subtract the mean, times the outer learning rate, from the shared model."""
        ((_, _, shared, _),) = self
        if isinstance(self._mean, Tensor):
            self.comb.subtract_from_(shared, self._mean, rate)
        else:
            shared.index_add_(0, self._mean.indices, self._mean.values, alpha=-rate)


def for_updates(settings: Settings, outer: Outer = PLAIN) -> Settings:
    """Return the settings with the feedback for updates; raise if they are for gradients only."""
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
