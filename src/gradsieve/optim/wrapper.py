"""A wrapper for any optimizer: gradients are exchanged before its step, or updates after it."""

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
from gradsieve.updates.defaults import AUTO, chosen_exchange, decides, default_rules


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer: `step()` exchanges gradients before the optimizer's step, or updates after it.

    With `exchange="gradients"`, `step()` overwrites all `.grad` with their means over all ranks, and then the optimizer
    steps. With `exchange="updates"` the optimizer steps on this rank's own gradients, and its updates are exchanged
    after every `local_steps` steps (see `gradsieve.updates`). This is what Adam needs.

    If a delivered entry is not finite, no rank steps and no state changes. A parameter without a gradient counts as
    zero on this rank. All ranks make the wrapper together, and step together. To schedulers and trainers it is an
    `Optimizer`, with the parameter groups, state and hooks of the wrapped one.

    Args:
        optimizer: The optimizer to wrap.
        parameters: The model, or its `named_parameters()`. It must not be wrapped in DDP. Updates need the model.
        recipe: What to send and how to sum it, by name or as a `Recipe`. "auto", the default, decides from measured
            step times: for gradients between "oktopk", "topka" and dense, for updates between "onebit" and dense
            gradients.
        density: Fraction of the entries to send per step, or a schedule of it. The default for updates is 0.5.
            Gradients have no default.
        exchange: "gradients" or "updates".
        local_steps: Optimizer steps per exchange; None is 1. More sends less. Updates only.
        outer: How the shared model follows the delivered mean (DiLoCo, SparseLoCo); None moves it by that mean.
            Updates only.
        scaler: The `GradScaler` in use, if any. Call `exchange()` before its `unscale_` or `step`. Gradients only.
        rules: Which parameters are sent whole. None is biases, norms and small tensors, and no parameter with the
            default recipe for Adam's updates.
        group_mb: The largest group in MB; None, the default, is one group for the whole model.
        local_clip_norm: Clip each rank's gradient to this norm before it is added to the residual, as in DGC.
            Gradients only.
        comm: The ranks: a `Comm`, a process group, or None for the default process group.
        timeout_seconds: How long to wait for a peer; None is the timeout of the process group.
        start: What to do with the initial parameters. "broadcast", the default, copies those of rank 0, "check" raises
            if they differ, and "trust" does neither.
        sinks: They get the statistics of every step.

    Raises:
        InputError: An argument is not allowed.
        MismatchError: The ranks have different settings or models.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> def train(comm):
        ...     model = torch.nn.Linear(64, 64)
        ...     inner = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = gradsieve.DistributedOptimizer(inner, model, density=0.01, comm=comm)
        ...     model(torch.ones(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     return optimizer.sieve.stats.steps
        >>> run_ranks(2, train)
        [1, 1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Named,
        recipe: str | Recipe | None = AUTO,
        *,
        density: float | Schedule | None = None,
        exchange: Literal["gradients", "updates"] = "gradients",
        local_steps: int | None = None,
        outer: Outer | None = None,
        scaler: Scaler | None = None,
        **options: Unpack[Options],
    ) -> None:
        # No `super().__init__()`: the wrapped optimizer has everything that it would make.
        self.optimizer = optimizer
        _check_optimizer(optimizer)
        chooses = decides(recipe)
        check_scaler(scaler)
        self._parameters = parameters_of(optimizer, parameters)
        self._scaler = scaler
        self._counted: bool | None = None  # the result of `exchange`, until `step` has used it
        self._updates: UpdateExchange | None = None
        _check_exchange(exchange, local_steps, outer, scaler)
        chosen, schedule = chosen_exchange(recipe, density, optimizer if exchange == "updates" else None)
        if exchange == "updates":
            the_outer = (outer or Outer()).every(local_steps)
            rules = options.get("rules") or default_rules(chosen, optimizer)
            self._updates = UpdateExchange(
                optimizer, parameters, self._parameters, chosen, schedule, rules, the_outer, options, chooses=chooses
            )
            return
        _check_momentum(optimizer, chosen)
        self._exchange = Exchange(self._parameters, chosen, schedule, options, chooses=chooses)

    @property
    def sieve(self) -> Sieve:
        """The handle: statistics, sinks, dense phases, clipping."""
        return self._exchange.sieve if self._updates is None else self._updates.sieve

    @torch.no_grad()
    def exchange(self) -> bool:
        """Overwrite all `.grad` with their means now, so that they can be clipped or inspected before `step()`.

        It must be called with a `GradScaler`, before `scaler.unscale_` or `scaler.step`: these see the gradients of one
        rank only.

        Returns:
            Whether the step counts, the same on every rank.

        Raises:
            InputError: Updates are exchanged, or a gradient is a sparse tensor.
        """
        if self._updates is not None:
            raise InputError(
                "updates are exchanged by step(), after the optimizer's own step: to clip gradients before it, use "
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
        """Exchange, unless `exchange` has been called since the last step, and step the optimizer.

        A closure is called once, before the exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._counted = None  # the closure has made new gradients
        if self._updates is not None:
            self._updates.before_step()
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
        """Clear gradients as the wrapped optimizer does. The next `step` exchanges again."""
        self._counted = None
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and this rank's residual. Each rank saves its own state."""
        if self._updates is not None:
            return {**self.optimizer.state_dict(), STATE_KEY: self.sieve.state_dict()}
        return self._exchange.add_state_to(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state that this rank saved."""
        self.optimizer.load_state_dict(take_state_from(state_dict, self.sieve))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, since the ranks have agreed on the parameters."""
        raise InputError("parameters cannot be added any more: add the group to the optimizer, then wrap it")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default settings of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # during construction or copying
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
        raise InputError("local_steps and outer are for exchange='updates', got exchange='gradients'")
    if exchange == "updates" and scaler is not None:
        raise InputError(
            "a scaler may skip the step of one rank only, and updates are exchanged by step() on all ranks: wrap the "
            "model in DistributedDataParallel and use gradsieve.attach(model, optimizer=optimizer)"
        )


def _check_momentum(optimizer: Optimizer, recipe: Recipe) -> None:
    if isinstance(recipe.feedback, MomentumResidual) and any(group.get("momentum") for group in optimizer.param_groups):
        raise InputError(
            "this recipe holds the momentum itself, and the optimizer would add another: make it with momentum=0"
        )
