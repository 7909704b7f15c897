"""The optimizers of the papers.

Ok-Topk SGD (Li and Hoefler, PPoPP 2022, https://arxiv.org/abs/2201.07598, Algorithm 2) has the learning rate inside the
residual:
1. accumulated = residual + lr * grad
2. total, leftover = Ok-Topk of accumulated
3. w -= total / P; residual = accumulated without the delivered entries
gTop-k S-SGD (Shi et al., ICDCS 2019, https://arxiv.org/abs/1901.04359) and GaussianK-SGD (Shi et al., 2019,
https://arxiv.org/abs/1911.08772) keep the residual in units of the gradient, and apply the learning rate and momentum
to the mean.
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
    """Ok-Topk SGD as published: a gradient enters the residual times the learning rate of its step.

    After a cut of the learning rate, the residual is still delivered at its old size. In units of the gradient it would
    shrink as well. `.grad` is not changed. All ranks make it together, and step together.

    Args:
        parameters: The model, or its `named_parameters()`. It must not be wrapped in DDP.
        lr: The learning rate.
        density: Fraction of the entries to send per step, or a schedule of it.
        weight_decay: This multiple of the parameters is added to the gradient, before everything else.
        **options: The keyword arguments of `DistributedOptimizer` from `rules` to `sinks`.

    Raises:
        InputError: An argument is not allowed.
        MismatchError: The ranks have different settings or models.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> def train(comm):
        ...     model = torch.nn.Linear(64, 64)
        ...     optimizer = gradsieve.OkTopkSGD(model, lr=0.1, density=0.01, comm=comm)
        ...     model(torch.ones(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     return optimizer.sieve.stats.steps
        >>> run_ranks(2, train)
        [1, 1]
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
        """The handle: statistics, sinks, dense phases."""
        return self._exchange.sieve

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange `lr * grad` and subtract the mean. No rank does if a delivered entry is not finite."""
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
        """Refused after the construction, when the ranks have agreed on the parameters."""
        if "_exchange" in self.__dict__:
            raise InputError("parameters cannot be added any more: make another optimizer with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return learning rates and this rank's residual. Each rank saves its own state."""
        return self._exchange.add_state_to(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state that this rank saved."""
        super().load_state_dict(take_state_from(state_dict, self.sieve))


class _MomentumSGD(DistributedOptimizer):
    """Momentum SGD on the mean that one recipe delivers."""

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
    """gTop-k S-SGD: momentum SGD on the k entries that survive a tree of merges.

    All ranks make it together, and step together.

    Args:
        parameters: The model, or its `named_parameters()`. It must not be wrapped in DDP.
        lr: The learning rate.
        density: Fraction of the entries to send per step, or a schedule of it.
        momentum: The momentum of SGD, applied to the delivered mean.
        weight_decay: The weight decay of SGD.
        **options: The keyword arguments of `DistributedOptimizer` from `rules` to `sinks`.

    Raises:
        InputError: An argument is not allowed.
        MismatchError: The ranks have different settings or models.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> def train(comm):
        ...     model = torch.nn.Linear(64, 64)
        ...     optimizer = gradsieve.GTopkSGD(model, lr=0.1, density=0.01, comm=comm)
        ...     model(torch.ones(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     return optimizer.sieve.stats.steps
        >>> run_ranks(2, train)
        [1, 1]
    """

    recipe = RECIPES["gtopk"]()


class GaussianKSGD(_MomentumSGD):
    """GaussianK-SGD: momentum SGD on entries above a threshold from mean and standard deviation.

    All ranks make it together, and step together.

    Args:
        parameters: The model, or its `named_parameters()`. It must not be wrapped in DDP.
        lr: The learning rate.
        density: Fraction of the entries to send per step, or a schedule of it.
        momentum: The momentum of SGD, applied to the delivered mean.
        weight_decay: The weight decay of SGD.
        **options: The keyword arguments of `DistributedOptimizer` from `rules` to `sinks`.

    Raises:
        InputError: An argument is not allowed.
        MismatchError: The ranks have different settings or models.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> def train(comm):
        ...     model = torch.nn.Linear(64, 64)
        ...     optimizer = gradsieve.GaussianKSGD(model, lr=0.1, density=0.01, comm=comm)
        ...     model(torch.ones(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     return optimizer.sieve.stats.steps
        >>> run_ranks(2, train)
        [1, 1]
    """

    recipe = RECIPES["gaussiank"]()
