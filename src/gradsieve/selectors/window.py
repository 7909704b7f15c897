"""A moving window: k consecutive entries, the same on all ranks, whatever their values.

1. The vector is cut into ceil(numel / k) windows of equal length, as nearly as possible.
2. Each step sends the next window. After as many steps each entry has been sent once.
3. If k changes, the next window begins where the last one ended. It ends at the next bound of the new cut.
With error feedback no entry is lost. Zeros in the window are sent. If any entry of the vector is not finite, the first
value of the window is sent as NaN: all ranks see it in the exchange itself and skip the step.

Cost: no indices to send, and one pass only if accumulating has not looked for entries that are not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries, kernels
from gradsieve.selectors.protocol import Selector
from gradsieve.vector import SparseVector


class WindowState(NamedTuple):
    """The same on every rank."""

    position: int = 0  # the first index of the next window


@dataclass(frozen=True)
class Window(Selector[WindowState]):
    """Selects k consecutive entries, beginning where the last step ended."""

    selects_zeros: ClassVar[bool] = True

    @override
    def init(self, numel: int) -> WindowState:
        return WindowState()

    def floor(self, state: WindowState) -> float | None:
        """Return infinity: entries that are not finite, and only those, are not below it."""
        return math.inf

    @override
    def select(
        self, accumulated: Tensor, k: int, state: WindowState, candidates: Entries | None
    ) -> tuple[SparseVector, WindowState]:
        numel = accumulated.numel()
        start, stop = window(numel, k, state.position)
        values = accumulated[start:stop]
        if not _all_finite(accumulated, candidates):
            values = values.clone()
            values[0] = math.nan
        return SparseVector.run(values, start, numel), WindowState(stop % numel)


def window(numel: int, k: int, position: int) -> tuple[int, int]:
    """Return the range from `position` to the next bound of the cut into ceil(numel / k) windows."""
    count = -(-numel // k)
    number = ((position + 1) * count - 1) // numel  # of the window with `position`
    return position, numel * (number + 1) // count


def _all_finite(accumulated: Tensor, candidates: Entries | None) -> bool:
    if candidates is None:  # not collected while accumulating, or too many
        return kernels(accumulated).all_finite(accumulated)
    return candidates[0].numel() == 0
