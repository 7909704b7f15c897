"""Optimizers that take into account that each rank steps on its own gradient."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


class OwnGradients(Optimizer):
    """Mixin for a torch optimizer whose updates are exchanged."""

    _num_ranks: int = 1

    def for_ranks(self, num_ranks: int) -> None:
        """Set the number of ranks that step on their own gradients. With 1 it is torch's optimizer, bit for bit."""
        self._num_ranks = num_ranks

    def share_of_mean(self, parameter: Tensor, num_ranks: int) -> float:
        """Return E[mean gradient²] / E[own gradient²], as far as this optimizer uses it; 1 if it has no such use."""
        return 1.0
