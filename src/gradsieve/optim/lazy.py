"""Adam for gradients that are delivered now and then.

Adam divides a gradient by the root of the mean of its squares over all steps. Where entries are delivered sparsely most
of those squares are zeros that nobody sent, and the mean is too small: an entry that comes first after t steps is moved
sqrt(t) times the learning rate, and all that were owed for long come so at about the same time. Here an entry's mean is
over the steps in which it was delivered:
1. c += 1, where the gradient is not zero; nothing else of the entry changes elsewhere
2. v += (g² - v) (1 - beta) / (1 - beta^c): Adam's mean with its correction for the start, counted in deliveries
3. w -= lr * g / (sqrt(v) + eps)
This is what `torch.optim.SparseAdam` and TensorFlow's LazyAdam do for rows of embeddings, but for the count: theirs is
of all steps, so that they too move what comes late too far. There are no first moments: what error feedback delivers is
a sum over steps already, and momentum on top of it comes too late.

Only delivered entries are touched: a step reads the gradient once and a few percent of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve.errors import InputError
from gradsieve.kernels import kernels

DTYPES = (torch.float32, torch.float64)
MOST_COUNTED = 1 << 20  # deliveries; counts are floats, exact up to 2^24
NEGLIGIBLE = 2.0**-24  # what is left of the correction when counting may stop
FIRST_GUESS = 32  # one entry in so many is thought to be delivered at first


class LazyAdam(Optimizer):
    """Adam without first moments, whose second moments count deliveries. For gradients that a sieve has written.

    `beta` is Adam's second one: more smooths over more deliveries. `weight_decay` is apart from the gradient, as in
    AdamW, and for all entries in every step. Dense gradients are moved as by `torch.optim.Adam` with betas
    `(0, beta)`, but for entries that are exactly zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not 0 <= value < math.inf:
                raise InputError(f"{name} must be finite and not negative, got {value}")
        if not 0 <= beta < 1:
            raise InputError(f"beta must be in [0, 1), got {beta}")
        self._guesses: dict[Tensor, int] = {}  # how many entries will come; a wrong guess costs a second pass
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Optimizers are copied and pickled without what they have beside their state.
        super().__setstate__(state)
        self._guesses = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters are float32 or float64: moments of anything shorter would not move."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in DTYPES:
                raise InputError(f"LazyAdam moves float32 and float64 parameters, got {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move what was delivered."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, given: Tensor, group: dict[str, Any]) -> None:
        if given.is_sparse:
            raise InputError("LazyAdam takes dense tensors that are mostly zero, not sparse ones")
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state = self.state[parameter]
        if not state:
            state["mean_square"] = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            state["deliveries"] = torch.zeros_like(state["mean_square"])
        flat, grad = parameter.detach().reshape(-1), given.reshape(-1)
        chosen = kernels(flat, grad)
        indices, values = chosen.compact(grad, 0.0, self._guesses.get(parameter, grad.numel() // FIRST_GUESS))
        self._guesses[parameter] = indices.numel()
        moments = state["mean_square"], state["deliveries"]
        weights = _weights(group["beta"], flat.dtype, flat.device)
        chosen.move_delivered_(flat, *moments, indices, values, weights, group["lr"], group["eps"])
        if not parameter.is_contiguous():  # then `flat` is a copy
            parameter.copy_(flat.view_as(parameter))


@cache
def _weights(beta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of a new square in the mean, by how many came before; the last one holds for all that follow."""
    counted = 1 if beta == 0 else min(MOST_COUNTED, math.ceil(math.log(NEGLIGIBLE) / math.log(beta)))
    weights = (1 - beta) / (1 - beta ** torch.arange(1, counted + 1, dtype=torch.float64))
    return weights.to(device, dtype)
