"""The handle of a model whose updates are exchanged, and the hooks that switch its parameters."""

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
from gradsieve.updates.decision import UpdateDecision
from gradsieve.updates.engine import UpdateEngine
from gradsieve.updates.model import LocalModel
from gradsieve.updates.signal import NO_SAMPLE, SignalMeter, needs_signal

OPTIMIZER_KEY = "optimizer"

T = TypeVar("T")


class UpdateSieve(Sieve):
    """The handle of a model whose updates are exchanged. Its state includes this rank's optimizer state."""

    local: LocalModel
    optimizer: Optimizer
    _exchange_now: Callable[[], None] = staticmethod(lambda: None)  # nothing to do if the optimizer's step exchanges
    _loaded: dict[str, Any] | None = None  # a loaded optimizer state, until the next training pass

    def follow(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Set the parameters and the optimizer whose updates are exchanged."""
        self.local, self.optimizer = LocalModel(parameters, self._updates), optimizer
        if needs_signal(optimizer):
            self._updates.measure_with(SignalMeter(parameters, optimizer))
        self.parameters = tuple(parameters.values())

    def choose(self, sparse_name: str) -> UpdateDecision:
        """Choose from now on between updates, exchanged by a recipe of this name, and dense gradients."""
        decision = UpdateDecision(self._updates, self.local, self.optimizer, sparse_name)
        self.engine.decide_by(decision)
        return decision

    @property
    def _steps_alike(self) -> bool:
        """Whether all ranks step on the mean gradient at present, instead of each on its own."""
        return isinstance(self.engine.decision, UpdateDecision) and self.engine.decision.is_dense

    def adapt(self, optimizer: T) -> T:
        """Turn the optimizer that was given to `attach` into its sieve-aware form, in place (see `Sieve.adapt`)."""
        rank, size = self.engine.comm.rank, self.engine.comm.size
        if layers(optimizer)[-1] is not self.optimizer:
            raise InputError(
                f"rank {rank}: this sieve exchanges the updates of another optimizer, and those of this "
                f"{type(optimizer).__name__} would be lost: use the optimizer that was given to attach"
            )
        if not aware(optimizer, 1 if self._steps_alike else size):
            warnings.warn(
                f"{type(self.optimizer).__name__} has no sieve-aware form and is left as it is: it steps on this "
                "rank's own gradient, which has more noise than the mean of all ranks",
                RuntimeWarning,
                stacklevel=2,
            )
        return optimizer

    @property
    def clip_factor(self) -> float:
        """The square root of the number of ranks: a rank's own gradient is longer than the mean by about that.

        It is 1 while gradients are exchanged densely (recipe "auto").
        """
        return 1.0 if self._steps_alike else math.sqrt(self.engine.comm.size)

    def exchange(self) -> None:
        """Exchange the last step's updates now, instead of before the next training pass. All ranks call it together.

        For the end of training: otherwise the last updates stay in each rank's residual.
        """
        self._exchange_now()

    def exchange_by(self, exchange_now: Callable[[], None]) -> None:
        """Set the function that exchanges if an exchange is due."""
        self._exchange_now = exchange_now

    def before_training(self) -> None:
        """Load this rank's own optimizer state again: a framework may have loaded rank 0's after it.

        Settings are kept: a scheduler may have set the learning rate since.
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
        """Return the parameters of the shared model, flat, by name; the same on every rank, bit for bit."""
        if self.local.is_paused:  # the optimizer has moved the parameters only
            self.local.take_on()
        return self._updates.shared

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to continue bit for bit, including its optimizer's state."""
        ((key, own),) = super().state_dict().items()
        engine = self._updates
        return {
            key: {
                **own,
                OPTIMIZER_KEY: self.optimizer.state_dict(),
                "local_steps_done": engine.local_steps_done,
                "is_due": engine.is_due,
                "outer": engine.outer_state(),
                "sample": NO_SAMPLE if engine.meter is None else engine.meter.sample,
            }
        }

    def load_state_dict(self, states: Mapping[str, Any], *, keep: Keep = "mean") -> None:
        """Continue from the state that this rank saved, or from the states of all ranks of a run of another size.

        `keep="mean"` preserves the mean of all local models. After a change of the number of ranks, rank r takes the
        optimizer state of rank r modulo the old number.
        """
        comm = self.engine.comm
        super().load_state_dict(states, keep=keep)
        own = states.get(key_of(comm.rank, comm.size))
        same_size = own is not None
        if own is None:
            ordered = [states[key_of(rank, len(states))] for rank in range(len(states))]
            own = ordered[comm.rank % len(ordered)]
        if OPTIMIZER_KEY not in own:
            raise InputError(
                f"rank {comm.rank}: the state is from a run that exchanged gradients, and this run exchanges updates"
            )
        self._loaded = own[OPTIMIZER_KEY]
        self.optimizer.load_state_dict(self._loaded)
        self._updates.local_steps_done, self._updates.is_due = own["local_steps_done"], own["is_due"]
        self._updates.load_outer_state(own["outer"])
        if self._updates.meter is not None:
            # That of another number of ranks is dropped: a rank without one leaves the step out, on all ranks.
            self._updates.meter.sample = own.get("sample", NO_SAMPLE) if same_size else NO_SAMPLE
        if self.local.is_ahead:
            self.local.exchanged()


def bind(module: nn.Module, optimizer: Optimizer, local: LocalModel, before_training: Callable[[], None]) -> None:
    """Register the hooks that write the local model before training passes and the shared model at all other times.

    `before_training` is a bound method that is called before each training pass. The hooks hold its object and the
    local model weakly: a module must not keep a sieve and its worker alive.
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
        local.before_step()

    rest = call(LocalModel.rest)
    module.register_forward_pre_hook(call(turn))
    module.register_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    optimizer.register_step_pre_hook(call(step))
    optimizer.register_step_post_hook(rest)


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
