"""What a user would pick instead: DistributedDataParallel and the communication hooks that come with torch."""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks and refuses those that are text.

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from gradsieve.lab.batched_power_sgd import BatchedPowerSgd, batched_power_sgd_hook, square_side
from gradsieve.registry import Registry

GRACE_DENSITY = 0.01
LOCAL_STEPS = 4  # as in the documentation of torch's averager
DENSE_SHARE = 0.1  # of the steps, before hooks that begin late do; what torch's documentation of PowerSGD advises
EARLIEST_START = 2  # PowerSGD's: DDP cuts its buckets anew after the first step
WHOLE_MODEL_MB = 100_000
POWER_SGD_RANKS = (1, 2, 4, 8, 16, 32)
USUAL_RANKS = (1, 2, 4)

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
MakeHook = Callable[[int], tuple[Any, Hook]]
"""From the step at which it begins, if it `begins_late`."""

Shapes = Sequence[Sequence[int]]
CountBytes = Callable[[Shapes, int], float]
"""What a rank receives in a step, from the shapes of a model and the number of ranks, all_reduce at its optimum."""


def dense_bytes(shapes: Shapes, size: int) -> float:
    """Of float32."""
    return 2 * (size - 1) / size * 4 * sum(map(prod, shapes))


def _power_sgd_bytes(rank: int) -> CountBytes:
    """torch leaves as they are vectors, and matrices of which it would not save half."""

    def count(shapes: Shapes, size: int) -> float:
        sent = 0
        for shape in shapes:
            rows, columns = shape[0], prod(shape[1:])
            factors = (rows + columns) * rank
            sent += factors if len(shape) > 1 and 2 * factors < rows * columns else rows * columns
        return 2 * (size - 1) / size * 4 * sent

    return count


@dataclass(frozen=True)
class Peer:
    """A hook with its state, and how DDP must be set up for it."""

    description: str
    make_hook: MakeHook | None = None  # None: DDP's own dense all_reduce
    bucket_mb: int | None = None  # None is as DDP has it: 25, but 1 for the first, which any number would change
    begins_late: bool = False  # whether a run should exchange as DDP does at first, for a share of its steps
    earliest_start: int = 0  # step before which it exchanges as DDP does in any case
    local_steps: int = 1  # between two averagings of the model, if gradients are not exchanged at all
    bytes_received: CountBytes = dense_bytes
    usual: bool = True  # whether it is raced where no peers are named

    def num_dense_steps(self, total_steps: int) -> int:
        """Of a run, before the hook begins."""
        return max(self.earliest_start, round(DENSE_SHARE * total_steps) if self.begins_late else 0)


def _power_sgd(rank: int) -> MakeHook:
    def make(start: int) -> tuple[Any, Hook]:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=max(start, EARLIEST_START)
        )
        return state, powerSGD_hook.powerSGD_hook

    return make


def _batched_power_sgd(rank: int) -> MakeHook:
    return lambda start: (BatchedPowerSgd(rank, max(start, EARLIEST_START)), batched_power_sgd_hook)


def _batched_bytes(rank: int) -> CountBytes:
    return lambda shapes, size: dense_bytes([(2 * rank, square_side(sum(map(prod, shapes))))], size)


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


def _post_local_sgd(start: int) -> tuple[Any, Hook]:
    state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=None, start_localSGD_iter=start, post_local_gradient_allreduce=False
    )
    return state, post_localSGD_hook.post_localSGD_hook


def _grace_topk(start: int) -> tuple[Any, Hook]:
    """As GRACE's own examples use it: parameter by parameter, the largest entries gathered by all, the rest kept."""
    from grace_dl.dist.communicator.allgather import Allgather
    from grace_dl.dist.compressor.topk import TopKCompressor
    from grace_dl.dist.memory.residual import ResidualMemory

    communicator = Allgather(TopKCompressor(GRACE_DENSITY), ResidualMemory(), dist.get_world_size())
    return communicator, _grace_hook


def _grace_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        grad.copy_(state.step(grad, id(parameter)))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _grace_bytes(shapes: Shapes, size: int) -> float:
    return (size - 1) * sum(8 * max(1, int(GRACE_DENSITY * prod(shape))) for shape in shapes)


def _installed_elsewhere() -> dict[str, Peer]:
    """GRACE (github.com/sands-lab/grace) is on no index: whoever has it on the path can race it."""
    if importlib.util.find_spec("grace_dl") is None:
        return {}
    return {"grace-topk": Peer("GRACE's top-k of 1 %", _grace_topk, WHOLE_MODEL_MB, bytes_received=_grace_bytes)}


def _as_power_sgd(
    description: str, make_hook: MakeHook, bytes_received: CountBytes, *, early: bool = False, usual: bool = True
) -> Peer:
    """PowerSGD starts collectives in callbacks, and over Gloo ranks would start those of several buckets in different
    orders, which crashes. So the whole model is one bucket.
    """
    return Peer(
        description,
        make_hook,
        WHOLE_MODEL_MB,
        begins_late=not early,
        earliest_start=EARLIEST_START,
        bytes_received=bytes_received,
        usual=usual,
    )


def _power_sgd_peers() -> dict[str, Peer]:
    """PowerSGD by itself, after a dense tenth of the steps or at once, and of all matrices as one."""
    peers = {}
    for rank in POWER_SGD_RANKS:
        usual, made = rank in USUAL_RANKS, (_power_sgd(rank), _power_sgd_bytes(rank))
        peers[f"powersgd-{rank}"] = _as_power_sgd(f"PowerSGD, rank {rank}", *made, usual=usual)
        peers[f"powersgd-early-{rank}"] = _as_power_sgd(
            f"PowerSGD, rank {rank}, from step {EARLIEST_START} on", *made, early=True, usual=False
        )
        peers[f"powersgd-batched-{rank}"] = _as_power_sgd(
            f"PowerSGD of all as one square, rank {rank}", _batched_power_sgd(rank), _batched_bytes(rank), usual=usual
        )
    return peers


PEERS: Registry[Peer] = Registry(
    "peer",
    {
        "ddp": Peer("DDP without a hook: dense all_reduce"),
        "fp16": Peer(
            "all_reduce of halves",
            lambda start: (None, default_hooks.fp16_compress_hook),
            bytes_received=lambda shapes, size: dense_bytes(shapes, size) / 2,
        ),
        "bf16": Peer(
            "all_reduce of bfloat16",
            lambda start: (None, _bf16_hook),
            bytes_received=lambda shapes, size: dense_bytes(shapes, size) / 2,
        ),
        **_power_sgd_peers(),
        "quantized-8bit": Peer(
            "all_gather of bytes",
            lambda start: (None, _quantized_hook),
            WHOLE_MODEL_MB,
            bytes_received=lambda shapes, size: (size - 1) * sum(map(prod, shapes)),
        ),
        "local-sgd": Peer(
            f"no gradients exchanged; the model averaged every {LOCAL_STEPS} steps, whose share a step is",
            _post_local_sgd,
            begins_late=True,
            local_steps=LOCAL_STEPS,
            bytes_received=lambda shapes, size: dense_bytes(shapes, size) / LOCAL_STEPS,
        ),
        **_installed_elsewhere(),
    },
)
