"""Adam with per-entry step counts, for entries that are updated only occasionally.

Adam divides a gradient by the root mean square over all steps. If entries are delivered sparsely, most of these squares
are zeros that no rank sent, and the mean is too small. An entry that is first delivered after t steps moves by sqrt(t)
times the learning rate, and many such entries are delivered at about the same time. Here an entry's mean is over the
steps in which it was delivered. Where the gradient g is not zero:
1. c += 1
2. v += (g² - v) (1 - beta) / (1 - beta^c): Adam's mean with its correction for the start, counted in deliveries
3. w -= lr * g / (sqrt(v) + eps)
Nothing changes where it is zero.

Cost: one pass over the gradient. Of moments and parameters only the delivered entries are read, a few percent.

Where this differs from `torch.optim.SparseAdam` and TensorFlow's LazyAdam, which do the same for rows of embeddings:
they count all steps, so that entries delivered late move too far. Here are no first moments either: error feedback
already delivers sums over steps, and momentum added to them acts too late.
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
NEGLIGIBLE = 2.0**-24  # counting may stop when the correction differs from one by less
FIRST_GUESS = 32  # at the first step, one entry in this many is expected to be delivered


class LazyAdam(Optimizer):
    """Adam with per-entry step counts, for sparsely exchanged gradients.

    It has no first moments. Its second moments are means over the steps in which an entry was delivered, that is, not
    zero. For dense gradients it steps as `torch.optim.Adam` with betas `(0, beta)`, except for entries that are exactly
    zero.

    Args:
        params: Parameters or parameter groups, float32 or float64.
        lr: The learning rate.
        beta: Decay of the second moments, Adam's second beta. More smooths over more deliveries.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient, as in AdamW. It applies to all entries at every step.

    Raises:
        InputError: A value is outside its range, or a parameter has another dtype.

    Example:
        >>> import gradsieve
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = gradsieve.LazyAdam([weight], lr=0.1)
        >>> weight.grad = torch.tensor([0.0, 0.0, 2.0, 0.0])
        >>> optimizer.step()
        >>> weight.detach()
        tensor([1.0000, 1.0000, 0.9000, 1.0000])
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
        self._guesses: dict[Tensor, int] = {}  # delivered entries per parameter; a wrong guess costs a second pass
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Optimizers are copied and pickled without attributes of their own.
        super().__setstate__(state)
        self._guesses = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, float32 or float64: shorter moments would not change in small steps."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in DTYPES:
                raise InputError(f"LazyAdam moves float32 and float64 parameters, got {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters where gradients were delivered."""
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
    """Return the weight of the c-th square in the mean, for c = 1, 2, ...; the last weight is for all later c."""
    counted = 1 if beta == 0 else min(MOST_COUNTED, math.ceil(math.log(NEGLIGIBLE) / math.log(beta)))
    weights = (1 - beta) / (1 - beta ** torch.arange(1, counted + 1, dtype=torch.float64))
    return weights.to(device, dtype)
