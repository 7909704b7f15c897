"""PowerSGD as baselines: torch's hook with and without a dense start, and the batched form, in several ranks.

"Rank" is here the rank of the matrix approximation: a higher rank is more accurate, and slower.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from gradsieve.lab.baselines.baseline import WHOLE_MODEL_MB, Baseline, CountBytes, Hook, MakeHook, Shapes, dense_bytes
from gradsieve.lab.baselines.batched_power_sgd import BatchedPowerSgd, batched_power_sgd_hook, square_side

EARLIEST_START = 2  # PowerSGD must not start earlier: DDP rebuilds its buckets after the first step
RANKS = (1, 2, 4, 8, 16, 32)
USUAL_RANKS = (1, 2, 4)


def power_sgd_baselines() -> dict[str, Baseline]:
    """For each rank: with a dense start, without one, and batched."""
    baselines = {}
    for rank in RANKS:
        usual, made = rank in USUAL_RANKS, (_power_sgd(rank), _power_sgd_bytes(rank))
        baselines[f"powersgd-{rank}"] = _one_bucket(f"PowerSGD, rank {rank}", *made, usual=usual)
        baselines[f"powersgd-early-{rank}"] = _one_bucket(
            f"PowerSGD, rank {rank}, from step {EARLIEST_START} on", *made, early=True, usual=False
        )
        baselines[f"powersgd-batched-{rank}"] = _one_bucket(
            f"PowerSGD, rank {rank}, the whole model as one square matrix",
            _batched_power_sgd(rank),
            _batched_bytes(rank),
            usual=usual,
        )
    return baselines


def _one_bucket(
    description: str, make_hook: MakeHook, bytes_received: CountBytes, *, early: bool = False, usual: bool = True
) -> Baseline:
    """The whole model is one bucket.

    PowerSGD starts collectives in callbacks. With several buckets, ranks would start them in different orders, and
    Gloo crashes.
    """
    return Baseline(
        description,
        make_hook,
        WHOLE_MODEL_MB,
        begins_late=not early,
        earliest_start=EARLIEST_START,
        bytes_received=bytes_received,
        usual=usual,
    )


def _power_sgd(rank: int) -> MakeHook:
    def make(start: int) -> tuple[Any, Hook]:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=max(start, EARLIEST_START)
        )
        return state, powerSGD_hook.powerSGD_hook

    return make


def _power_sgd_bytes(rank: int) -> CountBytes:
    """Vectors are sent uncompressed, and so are matrices whose factors would be more than half their size."""

    def count(shapes: Shapes, size: int) -> float:
        sent = 0
        for shape in shapes:
            rows, columns = shape[0], prod(shape[1:])
            factors = (rows + columns) * rank
            sent += factors if len(shape) > 1 and 2 * factors < rows * columns else rows * columns
        return 2 * (size - 1) / size * 4 * sent

    return count


def _batched_power_sgd(rank: int) -> MakeHook:
    return lambda start: (BatchedPowerSgd(rank, max(start, EARLIEST_START)), batched_power_sgd_hook)


def _batched_bytes(rank: int) -> CountBytes:
    return lambda shapes, size: dense_bytes([(2 * rank, square_side(sum(map(prod, shapes))))], size)
