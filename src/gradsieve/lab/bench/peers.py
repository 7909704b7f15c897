"""The peers of `gradsieve.lab.peers` in the race of single exchanges.

Hooks see what they see in training: a DDP model with the layers of a VGG-16, widened or narrowed to the wanted number
of entries. Only its backward pass is short: it hands over a prepared gradient. A step is timed from there to the mean
in `.grad`, so DDP's own copies into and out of its buckets are part of it, as in training.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from gradsieve.lab.bench.meter import Exchanged, Meter
from gradsieve.lab.peers import Peer

VGG16_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16_CLASSES = 10
REST_COLUMNS = 512
WARMUP_STEPS = 4  # DDP cuts its buckets anew after the first step, PowerSGD starts at its third


def vgg16_shapes(numel: int) -> list[tuple[int, ...]]:
    """VGG-16's convolutions and classifier, all channels scaled alike, and a matrix and a vector of what is left."""
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
    """Parameters in the shapes of a network, and a backward pass that hands over what it is given."""

    def __init__(self, storage: Tensor) -> None:
        super().__init__()
        self.shapes = vgg16_shapes(storage.numel())
        self.weights = nn.ParameterList([nn.Parameter(part) for part in self.cut(storage)])

    def cut(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor as its layers; views."""
        parts = torch.split(flat, [prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def forward(self, grad: Tensor) -> Tensor:
        """A number whose backward pass gives this gradient."""
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


class PeerContender:
    """A peer at work."""

    warmup_steps = WARMUP_STEPS

    def __init__(self, peer: Peer, storage: Tensor, meter: Meter) -> None:
        """`storage` holds the parameters' values, which nobody looks at: peers may share it."""
        self._peer = peer
        self._meter = meter
        self._layers = Layers(storage)
        # Parameters need not be equal on all ranks here, and sending them takes seconds on a slow link.
        self._model = DistributedDataParallel(
            self._layers,
            bucket_cap_mb=peer.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if peer.make_hook is not None:
            self._model.register_comm_hook(*peer.make_hook(0))
        self._averager = PeriodicModelAverager(peer.local_steps) if peer.local_steps > 1 else None

    def step(self, grad: Tensor) -> Exchanged:
        """One exchange; of several local steps and an averaging, the share of one step."""
        steps = self._peer.local_steps
        parts = [self._local_step(grad) for _ in range(steps)]
        received = [part.interface_bytes for part in parts if part.interface_bytes is not None]
        seconds = sum(part.seconds for part in parts) / steps
        return Exchanged(seconds, None, round(sum(received) / steps) if received else None)

    def mean(self) -> Tensor:
        """What the last step left in `.grad`, flat."""
        return torch.cat([weight.grad.reshape(-1) for weight in self._layers.weights if weight.grad is not None])

    def _local_step(self, grad: Tensor) -> Exchanged:
        self._model.zero_grad(set_to_none=True)
        handed = self._model(grad)

        def backward_and_average() -> None:
            handed.backward()
            if self._averager is not None:
                self._averager.average_parameters(self._layers.parameters())

        return self._meter(backward_and_average)
