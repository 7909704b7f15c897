"""Any optimizer, with gradients that are exchanged sparsely before it steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve.engine.scaling import Scaler, check_scaler, scale_of
from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.feedback import MomentumResidual
from gradsieve.optim.exchange import STATE_KEY, Exchange, Options, check_dense, flat, take_state_from
from gradsieve.optim.named import Named, parameters_of
from gradsieve.optim.updates import UpdateExchange
from gradsieve.recipes import Recipe
from gradsieve.sieve import Sieve
from gradsieve.updates import Outer
from gradsieve.updates.adapting import check_one_gradient
from gradsieve.updates.defaults import chosen_exchange, default_rules


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer. `step()` overwrites all `.grad` with their means over all ranks, then has it step.

    With `exchange="updates"` the optimizer, any optimizer, steps on this rank's own gradients, and what it did is
    exchanged after every `local_steps` steps (see `gradsieve.updates`). This is what Adam needs.

    If anything that was delivered is not finite, no rank steps and nobody's state changes. A parameter without gradient
    counts as zero on this rank. All ranks make it together, and step together. See `Options` for the rest.

    It is an `Optimizer` to schedulers and trainers; groups, state and hooks are those of the wrapped one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Named,
        recipe: str | Recipe | None = None,
        *,
        density: float | Schedule | None = None,
        exchange: Literal["gradients", "updates"] = "gradients",
        local_steps: int | None = None,
        outer: Outer | None = None,
        scaler: Scaler | None = None,
        **options: Unpack[Options],
    ) -> None:
        # Not `super().__init__`: everything it would make is the wrapped optimizer's.
        self.optimizer = optimizer
        _check_optimizer(optimizer)
        check_scaler(scaler)
        self._parameters = parameters_of(optimizer, parameters)
        self._scaler = scaler
        self._counted: bool | None = None  # what `exchange` said, until `step` has used it
        self._updates: UpdateExchange | None = None
        _check_exchange(exchange, local_steps, outer, scaler)
        chosen, schedule = chosen_exchange(recipe, density, optimizer if exchange == "updates" else None)
        if exchange == "updates":
            the_outer = (outer or Outer()).every(local_steps)
            rules = options.get("rules") or default_rules(chosen, optimizer)
            self._updates = UpdateExchange(
                optimizer, parameters, self._parameters, chosen, schedule, rules, the_outer, options
            )
            return
        _check_momentum(optimizer, chosen)
        self._exchange = Exchange(self._parameters, chosen, schedule, options)

    @property
    def sieve(self) -> Sieve:
        """Stats, sinks, dense phases."""
        return self._exchange.sieve if self._updates is None else self._updates.sieve

    @torch.no_grad()
    def exchange(self) -> bool:
        """Overwrite all `.grad` with their means now, for what goes between that and `step()`, such as clipping.

        Needed with a `GradScaler`, before `scaler.unscale_` or `scaler.step`: these look at one rank's gradients only.
        Returns whether the step counts, the same on every rank.
        """
        if self._updates is not None:
            raise InputError(
                "updates are exchanged by step(), after the optimizer's own: clip gradients before it, with "
                "optimizer.sieve.clip_grad_norm_(max_norm)"
            )
        vectors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            check_dense(name, parameter.grad, self.sieve.engine.comm.rank)
            vectors[name] = flat(parameter.grad)
        self._counted = self._exchange(vectors, scale_of(self._scaler))
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            if not parameter.grad.is_contiguous():
                parameter.grad.copy_(vectors[name].view(parameter.shape))
        return self._counted

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless `exchange` has been called since the last step, and have the optimizer step.

        A closure is called once, before the exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._counted = None  # it has made new gradients
        if self._updates is not None:
            self.optimizer.step()
            self._updates.after_step()
            return loss
        if self._counted is None:
            if self._scaler is not None:
                raise InputError(
                    f"rank {self.sieve.engine.comm.rank}: with a scaler, call optimizer.exchange() after backward and "
                    "before scaler.unscale_ or scaler.step: an overflow on one rank must be known to all"
                )
            self.exchange()
        counted, self._counted = self._counted, None
        if counted:
            self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; what `exchange` made is gone too."""
        self._counted = None
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and what this rank still owes. Every rank saves its own."""
        if self._updates is not None:
            return {**self.optimizer.state_dict(), STATE_KEY: self.sieve.state_dict()}
        return self._exchange.add_state_to(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank."""
        self.optimizer.load_state_dict(take_state_from(state_dict, self.sieve))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which parameters are exchanged is agreed on at the start."""
        raise InputError("parameters cannot be added any more: add the group to the optimizer, then wrap it")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being made or copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})\n{self.sieve!r}"


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedOptimizer):
        raise InputError("this optimizer exchanges gradients already: wrap it once only")
    check_one_gradient(optimizer)


def _check_exchange(exchange: str, local_steps: int | None, outer: Outer | None, scaler: Scaler | None) -> None:
    if exchange not in ("gradients", "updates"):
        raise InputError(f"exchange must be 'gradients' or 'updates', got {exchange!r}")
    if exchange == "gradients" and (local_steps, outer) != (None, None):
        raise InputError("local_steps and outer go with exchange='updates'")
    if exchange == "updates" and scaler is not None:
        raise InputError(
            "a scaler may skip the step of one rank only, and updates are exchanged by step(): wrap the model in "
            "DistributedDataParallel and use gradsieve.attach(model, optimizer=optimizer)"
        )


def _check_momentum(optimizer: Optimizer, recipe: Recipe) -> None:
    if isinstance(recipe.feedback, MomentumResidual) and any(group.get("momentum") for group in optimizer.param_groups):
        raise InputError(
            "this recipe holds the momentum itself, and the optimizer would add another: make it with momentum=0"
        )
