"""The handle of a model whose updates are exchanged, and the hooks that move its parameters ahead and to rest."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsieve.checkpoint.reshard import Keep, key_of
from gradsieve.errors import InputError
from gradsieve.sieve import Sieve
from gradsieve.updates.adapting import aware, layers
from gradsieve.updates.engine import UpdateEngine
from gradsieve.updates.model import LocalModel

OPTIMIZER_KEY = "optimizer"

T = TypeVar("T")


class UpdateSieve(Sieve):
    """The handle of a model whose updates are exchanged. Each rank's optimizer state is its own, and saved with it."""

    local: LocalModel
    optimizer: Optimizer
    _exchange_now: Callable[[], None] = staticmethod(lambda: None)  # the optimizer's step has exchanged already
    _loaded: dict[str, Any] | None = None  # the optimizer's state, until the next training pass

    def follow(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Keep the local model and the optimizer whose updates are exchanged."""
        self.local, self.optimizer = LocalModel(parameters, self._updates), optimizer
        self.parameters = tuple(parameters.values())

    def adapt(self, optimizer: T) -> T:
        """Turn the optimizer that was given to `attach` into its sieve-aware form, in place (see `Sieve.adapt`)."""
        rank, size = self.engine.comm.rank, self.engine.comm.size
        if layers(optimizer)[-1] is not self.optimizer:
            raise InputError(
                f"rank {rank}: this sieve exchanges the updates of another optimizer, and those of this "
                f"{type(optimizer).__name__} would be lost: give the optimizer that attach was given"
            )
        if not aware(optimizer, size):
            warnings.warn(
                f"{type(self.optimizer).__name__} has no sieve-aware form and is left as it is: it steps on this "
                "rank's own gradient, which has more noise than the mean of all ranks",
                RuntimeWarning,
                stacklevel=2,
            )
        return optimizer

    @property
    def clip_factor(self) -> float:
        """The root of the number of ranks: a rank's own gradient is longer than the mean by about that factor."""
        return math.sqrt(self.engine.comm.size)

    def exchange(self) -> None:
        """Exchange now what the next training pass would exchange first. All ranks call it together.

        For the end of training: else the last step stays with the rank that took it.
        """
        self._exchange_now()

    def exchange_by(self, exchange_now: Callable[[], None]) -> None:
        """Have this function exchange what is due."""
        self._exchange_now = exchange_now

    def before_training(self) -> None:
        """Have the optimizer go on from this rank's own state: a framework may have loaded rank 0's over it.

        Settings stay as they are: a scheduler may have set the learning rate since.
        """
        if self._loaded is not None:
            settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(self._loaded)
            for group, kept in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(kept)
            self._loaded = None

    @property
    def _updates(self) -> UpdateEngine:
        assert isinstance(self.engine, UpdateEngine)
        return self.engine

    def shared_parameters(self) -> Mapping[str, Tensor]:
        """The shared model's parameters, flat, by name; the same on every rank, bit for bit."""
        return self._updates.shared

    def state_dict(self) -> dict[str, Any]:
        """All this rank must know to go on exactly as it would have, its optimizer's state included."""
        ((key, own),) = super().state_dict().items()
        engine = self._updates
        return {
            key: {
                **own,
                OPTIMIZER_KEY: self.optimizer.state_dict(),
                "local_steps_done": engine.local_steps_done,
                "is_due": engine.is_due,
                "outer": engine.outer_state(),
            }
        }

    def load_state_dict(self, states: Mapping[str, Any], *, keep: Keep = "mean") -> None:
        """Go on from what `state_dict` gave on this rank, or on all ranks of a run of another size.

        `keep="mean"` preserves the mean of all local models. A rank without a state of its own takes over the optimizer
        state of rank r modulo the old size.
        """
        comm = self.engine.comm
        super().load_state_dict(states, keep=keep)
        own = states.get(key_of(comm.rank, comm.size))
        if own is None:
            ordered = [states[key_of(rank, len(states))] for rank in range(len(states))]
            own = ordered[comm.rank % len(ordered)]
        if OPTIMIZER_KEY not in own:
            raise InputError(
                f"rank {comm.rank}: the state is of a run that exchanged gradients, this one exchanges updates"
            )
        self._loaded = own[OPTIMIZER_KEY]
        self.optimizer.load_state_dict(self._loaded)
        self._updates.local_steps_done, self._updates.is_due = own["local_steps_done"], own["is_due"]
        self._updates.load_outer_state(own["outer"])
        if self.local.is_ahead:
            self.local.exchanged()


def bind(module: nn.Module, optimizer: Optimizer, local: LocalModel, before_training: Callable[[], None]) -> None:
    """Move ahead before training passes, after `before_training`; rest after steps, for evaluation and for saving.

    The hooks hold the local model and the object of the method `before_training` weakly: a module must not keep a sieve
    and its thread alive.
    """
    held, before = weakref.ref(local), weakref.WeakMethod(before_training)

    def call(action: Callable[[LocalModel], None]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if (found := held()) is not None:
                action(found)

        return hook

    def turn(local: LocalModel) -> None:
        if torch.is_grad_enabled():
            if (exchange := before()) is not None:
                exchange()
            local.ahead()
        else:
            local.rest()

    num_moved = _num_parameters(optimizer)

    def step(local: LocalModel) -> None:
        if _num_parameters(optimizer) != num_moved:
            raise InputError(
                "the optimizer has other parameters than when attach was called: give it all parameters first, with a "
                "learning rate of zero for those that are to be trained later"
            )
        local.ahead()

    rest = call(LocalModel.rest)
    module.register_forward_pre_hook(call(turn))
    module.register_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    optimizer.register_step_pre_hook(call(step))
    optimizer.register_step_post_hook(rest)


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
