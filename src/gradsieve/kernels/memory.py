"""Memory for vectors that every step reads and writes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGNED_BYTES = 64  # a cache line, and what streaming stores need


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of zeros; in main memory on large pages, if the system has any.

    NumPy asks Linux for large pages and torch does not. Measured, n = 14.7 million, 4 processes on 2 cores: the pass
    that accumulates took 8.8 ms with large pages and 10.4 ms without.
    """
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    memory = np.zeros(numel * dtype.itemsize + ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(memory[start : start + numel * dtype.itemsize]).view(dtype)
