"""Hooks that come with torch. Two of them do not run over Gloo as they are, and are called or written differently."""

# No `from __future__ import annotations`: DDP reads the annotations of a hook and refuses strings.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, quantization_hooks

from gradsieve.lab.baselines.baseline import Hook

LOCAL_STEPS = 4  # the period in the documentation of torch's averager


def fp16(start: int) -> tuple[Any, Hook]:
    return None, default_hooks.fp16_compress_hook


def bf16(start: int) -> tuple[Any, Hook]:
    return None, _bf16_hook


def quantized(start: int) -> tuple[Any, Hook]:
    return None, _quantized_hook


def post_local_sgd(start: int) -> tuple[Any, Hook]:
    state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=None, start_localSGD_iter=start, post_local_gradient_allreduce=False
    )
    return state, post_localSGD_hook.post_localSGD_hook


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    # Without NCCL, DDP refuses torch's bf16 hook by its name. Gloo can sum bf16, so a hook of another name works.
    return default_hooks.bf16_compress_hook(state, bucket)


def _quantized_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Quantize per tensor to 8 bits and gather from all ranks.

    torch's own hook fails over Gloo, whose futures hold a list where the hook expects a list of lists. The observer,
    the quantization and the two gathers are the same here. The gathers are blocking: with a single bucket there is
    nothing to overlap.
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
