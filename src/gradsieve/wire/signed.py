"""A run of values that are kept as one bit each, and decoded directly into the memory where they are needed."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import signs
from gradsieve.vector.deferred import DeferredRun
from gradsieve.wire.code import Array


class Signed(DeferredRun):
    """A run of float32 values in main memory, encoded as in `kernels.signs`."""

    _steps: Array
    _masks: Array

    def __init__(self, steps: Array, masks: Array, count: int, start: int, numel: int) -> None:
        object.__setattr__(self, "_steps", steps)
        object.__setattr__(self, "_masks", masks)
        self._set_run(start, count, numel)

    @cached_property
    @override
    def _made(self) -> Tensor:
        values = np.empty(self.nnz, np.float32)
        signs.decode(self._steps, self._masks, values)
        return torch.from_numpy(values)

    @override
    def all_finite(self) -> bool:
        return bool(np.isfinite(self._steps).all())

    @override
    def _copy_to_(self, target: Tensor) -> None:
        if _fits(target):
            signs.decode(self._steps, self._masks, target.numpy())
        else:
            super()._copy_to_(target)

    @override
    def _add_to_(self, target: Tensor, offset: int = 0, *, subtract: bool = False) -> None:
        if offset % signs.CHUNK_VALUES or not _fits(target):
            super()._add_to_(target, offset, subtract=subtract)
            return
        first, last = offset // signs.CHUNK_VALUES, -(-(offset + target.numel()) // signs.CHUNK_VALUES)
        steps = self._steps[first:last]
        signs.add(-steps if subtract else steps, self._masks[offset // 32 :], target.numpy())

    @override
    def _mean_to_(self, target: Tensor, size: int) -> None:
        if _fits(target):
            steps = torch.div(torch.from_numpy(self._steps), size).numpy()
            signs.decode(steps, self._masks, target.numpy())
        else:
            super()._mean_to_(target, size)


def _fits(target: Tensor) -> bool:
    return target.dtype == torch.float32 and target.device.type == "cpu" and target.is_contiguous()
