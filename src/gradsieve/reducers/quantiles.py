"""Quantiles of a set that is spread over ranks, from a few evenly spaced points of each rank's part.

Each rank gathers some of its sorted values, every one standing in the middle of an equal share of its part, and all
compute the same answer from all points. A count read off them is off by at most half a share of every rank's part; the
errors of different ranks are independent, so they mostly cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve.comm import Comm


def point_ranks(count: int, num_points: int) -> Tensor:
    """Positions in the middle of each of `num_points` equal shares of `count` sorted entries, if any."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    return (2 * torch.arange(num_points) + 1) * count // (2 * num_points)


class Spread:
    """The gathered points of all ranks, sorted, with the share of the set each stands for."""

    def __init__(self, points: Tensor, count: int, comm: Comm, descending: bool) -> None:
        header = torch.tensor([count], dtype=torch.int64)
        message = torch.cat([header.view(torch.uint8), points.cpu().view(torch.uint8)])
        parts = comm.all_gather_v(message)
        self.counts = [int(part[:8].view(torch.int64)) for part in parts]
        self.total = sum(self.counts)
        gathered = [part[8:].view(points.dtype) for part in parts]
        shares = [
            torch.full((part.numel(),), part_count / max(part.numel(), 1), dtype=torch.float64)
            for part, part_count in zip(gathered, self.counts, strict=True)
        ]
        joined = torch.cat(gathered)
        order = joined.argsort(descending=descending, stable=True)
        self._descending = descending
        self._points = joined[order]
        self._reached = torch.cat(shares)[order].cumsum(0)

    def at(self, count: float) -> float:
        """The point at which the shares so far come nearest to `count`; there must be any entries at all."""
        return self._points[int((self._reached - count).abs().argmin())].item()

    def count_before(self, value: float) -> float:
        """About how many entries of the whole set come before `value`, or are equal to it."""
        before = self._points >= value if self._descending else self._points <= value
        passed = int(before.sum())
        return float(self._reached[passed - 1]) if passed else 0.0
