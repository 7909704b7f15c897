"""Optimizers that know that each rank steps on its own gradient."""

from __future__ import annotations

from torch.optim import Optimizer


class OwnGradients(Optimizer):
    """Mixed into a torch optimizer: a sieve tells it how many ranks step on their own gradients."""

    _num_ranks: int = 1

    def for_ranks(self, num_ranks: int) -> None:
        """Each of `num_ranks` ranks steps on its own gradient from now on; 1 is torch's own optimizer, bit for bit."""
        self._num_ranks = num_ranks
