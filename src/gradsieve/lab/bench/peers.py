"""What a user would pick instead: DistributedDataParallel and the communication hooks that come with torch.

Hooks see what they see in training: a DDP model with the layers of a VGG-16, widened or narrowed to the wanted number
of entries. Only its backward pass is short: it hands over a prepared gradient. A step is timed from there to the mean
in `.grad`, so DDP's own copies into and out of its buckets are part of it, as in training.
"""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks and refuses those that are text.

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from gradsieve.lab.bench.meter import Exchanged, Meter
from gradsieve.registry import Registry

VGG16_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16_CLASSES = 10
REST_COLUMNS = 512
LOCAL_STEPS = 4  # as in the documentation of torch's averager
WARMUP_STEPS = 4  # DDP cuts its buckets anew after the first step, PowerSGD starts at its third
WHOLE_MODEL_MB = 100_000
DEFAULT_BUCKET_MB = 25

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
MakeHook = Callable[[], tuple[Any, Hook]]


@dataclass(frozen=True)
class Peer:
    """A hook with its state, and how DDP must be set up for it."""

    description: str
    make_hook: MakeHook | None = None  # None: DDP's own dense all_reduce
    bucket_mb: int = DEFAULT_BUCKET_MB
    local_steps: int = 1  # between two averagings of the model, if gradients are not exchanged at all


def _power_sgd(rank: int) -> MakeHook:
    """The batched form is not here: on torch 2.13 it always fails, at an assertion of its own on the matrices."""

    def make() -> tuple[Any, Hook]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook

    return make


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    # DDP refuses torch's bf16 hook, by its name, where there is no NCCL. Gloo adds bf16 all the same.
    return default_hooks.bf16_compress_hook(state, bucket)


def _quantized_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """torch's own per-tensor hook fails on Gloo, whose futures hold a list where it expects a list of lists.

    The same observer, quantization and gathers, one after the other: with one bucket there is nothing to overlap.
    """
    grad, size = bucket.buffer(), dist.get_world_size()
    observer = torch.ao.quantization.MinMaxObserver()
    observer(grad)
    scale_and_zero = torch.cat([part.float() for part in observer.calculate_qparams()])
    scales = [torch.empty_like(scale_and_zero) for _ in range(size)]
    dist.all_gather(scales, scale_and_zero)
    quantized = quantization_hooks._quantize_per_tensor_backend(grad, *scale_and_zero)  # type: ignore[no-untyped-call]
    gathered = [torch.empty_like(quantized) for _ in range(size)]
    dist.all_gather(gathered, quantized)
    total = torch.zeros_like(grad)
    for part, scale in zip(gathered, scales, strict=True):
        total += quantization_hooks._dequantize_per_tensor_backend(part, *scale)  # type: ignore[no-untyped-call]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total / size)
    return done


def _post_local_sgd() -> tuple[Any, Hook]:
    state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=None, start_localSGD_iter=0, post_local_gradient_allreduce=False
    )
    return state, post_localSGD_hook.post_localSGD_hook


# PowerSGD starts collectives in callbacks; over Gloo, ranks would start those of several buckets in different orders,
# which crashes. So the whole model is one bucket.
PEERS: Registry[Peer] = Registry(
    "peer",
    {
        "ddp": Peer("DDP without a hook: dense all_reduce"),
        "fp16": Peer("all_reduce of halves", lambda: (None, default_hooks.fp16_compress_hook)),
        "bf16": Peer("all_reduce of bfloat16", lambda: (None, _bf16_hook)),
        **{f"powersgd-{rank}": Peer(f"PowerSGD, rank {rank}", _power_sgd(rank), WHOLE_MODEL_MB) for rank in (1, 2, 4)},
        "quantized-8bit": Peer("all_gather of bytes", lambda: (None, _quantized_hook), WHOLE_MODEL_MB),
        "local-sgd": Peer(
            f"no gradients exchanged; the model averaged every {LOCAL_STEPS} steps, whose share a step is",
            _post_local_sgd,
            local_steps=LOCAL_STEPS,
        ),
    },
)


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
            self._model.register_comm_hook(*peer.make_hook())
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
