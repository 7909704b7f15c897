"""How a vector differs from the one that it was made from: the positions that changed, and what is there now."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradsieve.kernels import kernels


class Removed(NamedTuple):
    """The entries at these positions are gone; the others are the same."""

    positions: Tensor  # strictly increasing

    def apply_(self, dense: Tensor) -> None:
        """Make the change in a dense vector that holds the original entries."""
        kernels(dense).clear_(dense, self.positions)


class Replaced(NamedTuple):
    """The entries at these positions have other values, zero included; the others are the same."""

    positions: Tensor  # strictly increasing
    values: Tensor

    def apply_(self, dense: Tensor) -> None:
        """Make the change in a dense vector that holds the original entries."""
        kernels(dense).put_(dense, self.positions, self.values)


Change = Removed | Replaced
