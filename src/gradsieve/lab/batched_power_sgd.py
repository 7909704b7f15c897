"""torch's batched PowerSGD, mended: a bucket is one square matrix, not one for each layer.

On torch 2.13 `batched_powerSGD_hook` always fails: it orthogonalizes matrices by a function that takes only batches of
them. Here are the same arithmetic and the same two all_reduces, one after the other, since the whole model is one
bucket and there is nothing to overlap:
1. M = gradient + error of the step before, filled up with zeros to a square
2. P = M Q, with Q orthonormal; summed over ranks; orthonormalized
3. Q = M' P, averaged over ranks
4. the mean is P Q'; the error is what it lacks of M
"""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks and refuses those that are text.

from dataclasses import dataclass, field
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

SEED = 0  # of the first Q, the same on all ranks; torch's default


@dataclass
class BatchedPowerSgd:
    """What is kept between steps."""

    rank: int  # of the approximation: more is closer, and slower
    start: int  # the step it begins at; exchanged dense before
    step: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)  # by bucket
    factors: dict[int, Tensor] = field(default_factory=dict)


def batched_power_sgd_hook(
    state: BatchedPowerSgd,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP's way in."""
    grad = bucket.buffer()
    if state.step < state.start:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
    else:
        approximate(state, bucket.index(), grad)
    state.step += bucket.is_last()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(grad)
    return done


def square_side(numel: int) -> int:
    """Of the smallest square that holds so many entries."""
    return isqrt(max(0, numel - 1)) + 1


def approximate(state: BatchedPowerSgd, bucket: int, grad: Tensor) -> None:
    """Overwrite a bucket's gradient with the mean of low rank; all ranks together."""
    numel, side = grad.numel(), square_side(grad.numel())
    if bucket not in state.errors:
        generator = torch.Generator().manual_seed(SEED)
        state.errors[bucket] = grad.new_zeros(side * side)
        state.factors[bucket] = torch.randn(side, state.rank, generator=generator).to(grad)
    flat, right = state.errors[bucket], state.factors[bucket]
    flat[:numel] += grad
    matrix = flat.view(side, side)
    _orthogonalize(right.unsqueeze(0))  # type: ignore[no-untyped-call]
    left = matrix @ right
    dist.all_reduce(left)
    _orthogonalize(left.unsqueeze(0))  # type: ignore[no-untyped-call]
    torch.matmul(matrix.T, left, out=right)
    dist.all_reduce(right)
    right.div_(dist.get_world_size())
    mean = (left @ right.T).view(-1)
    flat -= mean
    grad.copy_(mean[:numel])
