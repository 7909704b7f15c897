"""Quantiles of a set that is spread over ranks, from a few evenly spaced points of each rank's part.

Each rank gathers `num_points` of its sorted values, every one standing for an equal share of its part, and all compute
the same answer from all points. A count read off them is right to within 1/num_points of the whole set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve.comm import Comm


def point_ranks(count: int, num_points: int) -> Tensor:
    """Positions of the last entry of each of `num_points` equal shares of `count` sorted entries."""
    return (torch.arange(1, num_points + 1) * count + num_points - 1) // num_points - 1


class Spread:
    """The gathered points of all ranks, sorted, with the share of the set each stands for."""

    def __init__(self, points: Tensor, count: int, comm: Comm, descending: bool) -> None:
        mine = torch.cat([torch.tensor([count], dtype=points.dtype), points.cpu()])
        gathered = comm.all_gather_v(mine)
        self.counts = [int(part[0]) for part in gathered]
        self.total = sum(self.counts)
        joined = torch.cat([part[1:] for part in gathered])
        shares = torch.cat(
            [
                torch.full((len(part) - 1,), part_count / max(len(part) - 1, 1), dtype=torch.float64)
                for part, part_count in zip(gathered, self.counts, strict=True)
            ]
        )
        order = joined.argsort(descending=descending, stable=True)
        self._points = joined[order]
        self._reached = shares[order].cumsum(0)

    def at(self, count: float) -> Tensor:
        """The first point at which the shares so far reach `count`; there must be any entries at all."""
        # Half an entry of tolerance: the shares are fractions and their sums are rounded.
        position = int(torch.searchsorted(self._reached, count - 0.5))
        return self._points[min(position, len(self._points) - 1)]
