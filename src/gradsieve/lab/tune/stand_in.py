"""A model that stands in for the user's: matrices of the right size, whose passes sleep and give prepared gradients."""

from __future__ import annotations

import time
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

FORWARD_SHARE = 1 / 3  # of computing time; backward computes two gradients per layer
LARGEST_SIDE = 1024  # of a matrix; several then share a group of 25 MB
FEWEST_LAYERS = 12

Shapes = list[tuple[int, ...]]


def stand_in_shapes(numel: int) -> Shapes:
    """Equal square matrices, at least twelve where the model is not tiny, and a smaller one for the rest."""
    side = max(1, min(LARGEST_SIDE, isqrt(max(1, numel // FEWEST_LAYERS))))
    layers, rest = divmod(numel, side * side)
    shapes: Shapes = [(side, side)] * layers
    rows, left = divmod(rest, side)
    return shapes + [shape for shape in ((rows, side), (left,)) if prod(shape)]


class StandIn(nn.Module):
    """Sleeps as long as the model would compute. Gradients come layer by layer, from the last to the first."""

    def __init__(self, numel: int, compute_seconds: float) -> None:
        super().__init__()
        self.numel = numel
        self._forward_seconds = FORWARD_SHARE * compute_seconds
        self._backward_seconds = compute_seconds - self._forward_seconds
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in stand_in_shapes(numel)])

    @override
    def forward(self, grad: Tensor) -> Tensor:
        _sleep(self._forward_seconds)
        parts = torch.split(grad, [weight.numel() for weight in self.weights])
        passed = grad.new_zeros(())
        for weight, part in zip(self.weights, parts, strict=True):
            seconds = self._backward_seconds * weight.numel() / self.numel
            passed = _Layer.apply(passed, weight, part.view(weight.shape), seconds)  # type: ignore[no-untyped-call]
        return passed


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Tensor, weight: Tensor, grad: Tensor, seconds: float) -> Tensor:
        ctx.grad, ctx.seconds = grad, seconds
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *received: Any) -> Any:
        _sleep(ctx.seconds)
        return received[0], ctx.grad, None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
