"""A moving window: k consecutive entries, the same on every rank, whatever their values.

The vector is cut into ceil(numel / k) windows of equal length, as far as that is possible, and each step sends the next
one: after as many steps every entry was sent once. With error feedback no entry is lost, and indices need not be sent.
If k changes, the next window begins where the last one ended, and ends at the next bound of the new cut.

Zeros in the window are sent. If an entry anywhere in the vector is not finite, the first value that is sent is NaN: all
ranks learn it in the exchange itself and skip the step.
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

    position: int = 0  # where the next window begins


@dataclass(frozen=True)
class Window(Selector[WindowState]):
    """Selects k consecutive entries, from where the last step ended."""

    selects_zeros: ClassVar[bool] = True

    @override
    def init(self, numel: int) -> WindowState:
        return WindowState()

    def floor(self, state: WindowState) -> float | None:
        """See `Selector.floor`: the entries that are not finite, and only those, are not below infinity."""
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
    """From `position` to the next bound of the cut into ceil(numel / k) equal windows."""
    count = -(-numel // k)
    number = ((position + 1) * count - 1) // numel  # of the window that `position` is in
    return position, numel * (number + 1) // count


def _all_finite(accumulated: Tensor, candidates: Entries | None) -> bool:
    if candidates is None:  # they were not collected while accumulating, or there were too many
        return kernels(accumulated).all_finite(accumulated)
    return candidates[0].numel() == 0
