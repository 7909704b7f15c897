"""A model as two flat vectors, parameters and gradients, and Adam on them.

The flat gradient is what is exchanged. `torch.optim` would do as well, but loads torch's compiler when first used: six
seconds of processor time for every worker, on a demo that trains for a minute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EPSILON = 1e-8


class FlatModel:
    """A model whose parameters and gradients are views of two vectors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = list(model.parameters())
        self.values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.grad = torch.zeros_like(self.values)
        sizes = [parameter.numel() for parameter in parameters]
        views = zip(parameters, torch.split(self.values, sizes), torch.split(self.grad, sizes), strict=True)
        for parameter, values, grad in views:
            parameter.data = values.view_as(parameter)
            parameter.grad = grad.view_as(parameter)


class Adam:
    """Kingma and Ba, 2015."""

    def __init__(self, numel: int, betas: Sequence[float]) -> None:
        self._first, self._second = torch.zeros(numel), torch.zeros(numel)
        self._betas = betas
        self._steps = 0

    def step(self, values: Tensor, grad: Tensor, rate: float) -> None:
        """Move the values against the gradient."""
        self._steps += 1
        first, second = self._betas
        self._first.lerp_(grad, 1 - first)
        self._second.mul_(second).addcmul_(grad, grad, value=1 - second)
        spread = self._second.sqrt().div_((1 - second**self._steps) ** 0.5).add_(EPSILON)
        values.addcdiv_(self._first, spread, value=-rate / (1 - first**self._steps))
