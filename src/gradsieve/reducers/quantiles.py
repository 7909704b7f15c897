"""Quantiles of a set that is spread over ranks, from a few evenly spaced points of each rank's part.

Each rank tells some of its sorted values, every one standing in the middle of an equal share of its part, and all
compute the same answer from all points. A count read off them is off by at most half a share of every rank's part; the
errors of different ranks are independent, so they mostly cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def point_ranks(count: int, num_points: int) -> Array:
    """Positions in the middle of each of `num_points` equal shares of `count` sorted entries, if any."""
    return (2 * np.arange(num_points if count else 0, dtype=np.int64) + 1) * count // (2 * num_points)


class Spread:
    """The points of all ranks, sorted, with the share of the set each stands for."""

    def __init__(self, points: Sequence[Array], counts: Sequence[float], *, descending: bool) -> None:
        self.counts = counts
        self.total = sum(counts)
        shares = [np.full(part.size, count / max(part.size, 1)) for part, count in zip(points, counts, strict=True)]
        joined = np.concatenate(points)
        order = np.argsort(-joined if descending else joined, kind="stable")
        self._descending = descending
        self._points = joined[order]
        self._reached = np.concatenate(shares)[order].cumsum()

    def at(self, count: float) -> Any:
        """The point at which the shares so far come nearest to `count`; there must be any entries at all."""
        return self._points[np.abs(self._reached - count).argmin()].item()

    def count_before(self, value: float) -> float:
        """About how many entries of the whole set come before `value`, or are equal to it."""
        before = self._points >= value if self._descending else self._points <= value
        passed = int(before.sum())
        return float(self._reached[passed - 1]) if passed else 0.0
