"""The papers' own optimizers.

Ok-Topk SGD (Li and Hoefler, PPoPP 2022, Algorithm 2) has the learning rate inside the residual:
1. accumulated = residual + lr * grad
2. total, leftover = Ok-Topk of accumulated
3. w -= total / P; residual = accumulated without what was delivered
gTop-k S-SGD (Shi et al., ICDCS 2019) and GaussianK-SGD (Shi et al., 2019) keep the residual in units of the gradient,
and apply the learning rate, and momentum, to the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.optim.exchange import Exchange, Options, check_dense, flat, take_state_from
from gradsieve.optim.named import Named, named_parameters
from gradsieve.optim.wrapper import DistributedOptimizer
from gradsieve.recipes import RECIPES, Recipe
from gradsieve.sieve import Sieve


class OkTopkSGD(Optimizer):
    """Ok-Topk SGD as published: what is owed was multiplied by the learning rate of the step it comes from.

    After a cut of the learning rate, old leftovers still arrive at full size; in units of the gradient they would
    shrink with it. `weight_decay` adds that much of the parameters to the gradient, before all else. `.grad` stays as
    it is.
    """

    def __init__(
        self,
        parameters: Named,
        lr: float,
        *,
        density: float | Schedule,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        if not lr >= 0:
            raise InputError(f"lr must not be negative, got {lr}")
        if not weight_decay >= 0:
            raise InputError(f"weight_decay must not be negative, got {weight_decay}")
        named = named_parameters(parameters)
        super().__init__(list(named.values()), {"lr": lr, "weight_decay": weight_decay})
        self._names = {parameter: name for name, parameter in named.items()}
        self._exchange = Exchange(named, RECIPES["oktopk"](), density, options)

    @property
    def sieve(self) -> Sieve:
        """Stats, sinks, dense phases."""
        return self._exchange.sieve

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange updates and apply their mean; no rank does if anything delivered is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = {
            self._names[parameter]: self._update(parameter, float(group["lr"]), group["weight_decay"])
            for group in self.param_groups
            for parameter in group["params"]
        }
        if self._exchange(updates):
            for parameter, name in self._names.items():
                parameter.sub_(updates[name].view(parameter.shape))
        return loss

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        check_dense(self._names[parameter], parameter.grad, self.sieve.engine.comm.rank)
        grad = parameter.grad.add(parameter, alpha=weight_decay) if weight_decay else parameter.grad
        return flat(grad) * lr

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is being made: which parameters are exchanged is agreed on at the start."""
        if "_exchange" in self.__dict__:
            raise InputError("parameters cannot be added any more: make another optimizer with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Learning rates, and what this rank still owes. Every rank saves its own."""
        return self._exchange.add_state_to(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank."""
        super().load_state_dict(take_state_from(state_dict, self.sieve))


class _MomentumSGD(DistributedOptimizer):
    """Momentum SGD on the mean of what one recipe delivers."""

    recipe: ClassVar[Recipe]

    def __init__(
        self,
        parameters: Named,
        lr: float,
        *,
        density: float | Schedule,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        named = named_parameters(parameters)
        inner = SGD(named.values(), lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(inner, named.items(), self.recipe, density=density, **options)


class GTopkSGD(_MomentumSGD):
    """gTop-k S-SGD: momentum SGD on the mean of the k largest sums that come out of a tree."""

    recipe = RECIPES["gtopk"]()


class GaussianKSGD(_MomentumSGD):
    """GaussianK-SGD: momentum SGD on the mean of what each rank picked by a threshold from mean and deviation."""

    recipe = RECIPES["gaussiank"]()
