"""torch's batched PowerSGD, repaired: a bucket is one square matrix, instead of one matrix per layer.

On torch 2.13 `batched_powerSGD_hook` always fails: it orthogonalizes its matrices with a function that accepts only
batches of matrices. The arithmetic and the two all_reduce calls are the same here. The calls are blocking: the whole
model is one bucket, so there is nothing to overlap.

1. M = gradient + error of the previous step, padded with zeros to a square matrix
2. P = M Q, with Q orthonormal; P is summed over ranks and orthonormalized
3. Q = M' P, averaged over ranks
4. the mean is P Q'; the error is M - P Q'
"""

# No `from __future__ import annotations`: DDP reads the annotations of a hook and refuses strings.

from dataclasses import dataclass, field
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

SEED = 0  # for the first Q, which must be equal on all ranks; torch's default


@dataclass
class BatchedPowerSgd:
    """State of the hook between steps."""

    rank: int  # of the approximation: higher is more accurate, and slower
    start: int  # first step that compresses; earlier steps are dense
    step: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)  # by bucket index
    factors: dict[int, Tensor] = field(default_factory=dict)  # Q, by bucket index


def batched_power_sgd_hook(
    state: BatchedPowerSgd,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
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
    """The side of the smallest square matrix with at least `numel` entries."""
    return isqrt(max(0, numel - 1)) + 1


def approximate(state: BatchedPowerSgd, bucket: int, grad: Tensor) -> None:
    """Overwrite a bucket's gradient with the low-rank mean. All ranks call it together."""
    numel, side = grad.numel(), square_side(grad.numel())
    if bucket not in state.errors:
        generator = torch.Generator().manual_seed(SEED)
        state.errors[bucket] = grad.new_zeros(side * side)
        state.factors[bucket] = torch.randn(side, state.rank, generator=generator).to(grad)
    flat, right = state.errors[bucket], state.factors[bucket]
    flat[:numel] += grad  # 1
    matrix = flat.view(side, side)
    _orthogonalize(right.unsqueeze(0))  # type: ignore[no-untyped-call]
    left = matrix @ right  # 2
    dist.all_reduce(left)
    _orthogonalize(left.unsqueeze(0))  # type: ignore[no-untyped-call]
    torch.matmul(matrix.T, left, out=right)  # 3
    dist.all_reduce(right)
    right.div_(dist.get_world_size())
    mean = (left @ right.T).view(-1)  # 4
    flat -= mean
    grad.copy_(mean[:numel])
