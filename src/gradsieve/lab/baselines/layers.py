"""Parameters in the shapes of a VGG-16, with a backward pass that only hands over a prepared gradient."""

from __future__ import annotations

from itertools import pairwise
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

VGG16_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16_CLASSES = 10
REST_COLUMNS = 512


def vgg16_shapes(numel: int) -> list[tuple[int, ...]]:
    """Shapes with `numel` entries in total.

    They are VGG-16's convolutions and classifier with all channels scaled alike. The entries that remain form one
    matrix and one vector.
    """
    scale = sqrt(numel / _vgg16_numel(1.0))
    while _vgg16_numel(scale) > numel and scale > 1e-4:
        scale *= 0.999
    shapes = _vgg16_layers(scale) if _vgg16_numel(scale) <= numel else []
    left = numel - sum(map(prod, shapes))
    rows = left // REST_COLUMNS
    rest = [(rows, REST_COLUMNS), (left - rows * REST_COLUMNS,)]
    return shapes + [shape for shape in rest if prod(shape)]


def _vgg16_layers(scale: float) -> list[tuple[int, ...]]:
    widths = [VGG16_CHANNELS[0], *(max(1, int(width * scale)) for width in VGG16_CHANNELS[1:])]
    convolutions = [(out, into, 3, 3) for into, out in pairwise(widths)]
    return [*convolutions, (VGG16_CLASSES, widths[-1])]


def _vgg16_numel(scale: float) -> int:
    return sum(map(prod, _vgg16_layers(scale)))


class Layers(nn.Module):
    """The forward pass takes a flat gradient. The backward pass writes it to the parameters' `.grad`."""

    def __init__(self, storage: Tensor) -> None:
        super().__init__()
        self.shapes = vgg16_shapes(storage.numel())
        self.weights = nn.ParameterList([nn.Parameter(part) for part in self.cut(storage)])

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the layers."""
        parts = torch.split(flat, [prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @override
    def forward(self, grad: Tensor) -> Tensor:
        handed: Tensor = _HandOver.apply(self, grad, *self.weights)  # type: ignore[no-untyped-call]
        return handed


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Layers, grad: Tensor, *weights: Tensor) -> Tensor:
        ctx.layers, ctx.grad = layers, grad
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        return None, None, *ctx.layers.cut(ctx.grad)
