"""When a backward pass has computed its last gradient."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn


class BackwardClock:
    """Records the time of the last computed gradient. What backward takes after that is waiting for the exchange."""

    def __init__(self, model: nn.Module) -> None:
        self.last = 0.0
        trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handles = [parameter.register_post_accumulate_grad_hook(self._record) for parameter in trained]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, parameter: Tensor) -> None:
        self.last = time.perf_counter()
