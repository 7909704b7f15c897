"""A baseline: how DDP is set up for a competing method, and how many bytes that method receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

DENSE_SHARE = 0.1  # of all steps, for hooks with a dense start: what torch's documentation of PowerSGD advises
WHOLE_MODEL_MB = 100_000  # larger than any model: DDP then makes a single bucket

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
MakeHook = Callable[[int], tuple[Any, Hook]]
"""Returns a hook and its state, from the step at which the hook starts to compress."""

Shapes = Sequence[Sequence[int]]
CountBytes = Callable[[Shapes, int], float]
"""Bytes that a rank receives per step, from the shapes of the parameters and the number of ranks.

Every all_reduce is counted at its lower bound, 2(P-1)/P of its bytes.
"""


def dense_bytes(shapes: Shapes, size: int) -> float:
    """Bytes per step of a float32 all_reduce."""
    return 2 * (size - 1) / size * 4 * sum(map(prod, shapes))


@dataclass(frozen=True)
class Baseline:
    """A hook with its state, and the DDP settings it needs."""

    description: str
    make_hook: MakeHook | None = None  # None: DDP's own dense all_reduce
    bucket_mb: int | None = None  # None keeps DDP's default: 25, and 1 for the first bucket, which any number overrides
    begins_late: bool = False  # whether the first `DENSE_SHARE` of the steps are dense
    earliest_start: int = 0  # every earlier step is dense, whatever `begins_late` says
    local_steps: int = 1  # steps between two averagings of the model; above 1, no gradients are exchanged
    bytes_received: CountBytes = dense_bytes
    usual: bool = True  # whether it takes part when no baseline is named

    def num_dense_steps(self, total_steps: int) -> int:
        """Steps of a run before the hook starts to compress."""
        return max(self.earliest_start, round(DENSE_SHARE * total_steps) if self.begins_late else 0)
