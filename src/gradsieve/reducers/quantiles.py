"""Quantiles of a set that is spread over ranks, from a few evenly spaced points of each rank's part.

Each rank sends some of its sorted values, each from the middle of an equal share of its part. All ranks compute the
same quantiles from all points. A count has an error of at most half a share of each rank's part. The errors of
different ranks are independent, so they mostly cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsieve.errors import MessageError

Array = np.ndarray[Any, np.dtype[Any]]

_EXACT_BITS = 24  # float32 holds whole numbers of this many bits exactly


def point_ranks(count: int, num_points: int) -> Array:
    """Return the middle positions of `num_points` equal shares of `count` sorted entries; none if `count` is 0."""
    return (2 * np.arange(num_points if count else 0, dtype=np.int64) + 1) * count // (2 * num_points)


@dataclass(frozen=True)
class Summary:
    """One rank's part: the number of its entries, and its points."""

    count: int
    points: Array

    def note(self) -> Array:
        """Return it as float32 numbers, with the count in two of them: one would round it."""
        note = np.empty(2 + self.points.size, np.float32)
        note[:2] = self.count >> _EXACT_BITS, self.count & (1 << _EXACT_BITS) - 1
        note[2:] = self.points
        return note

    @classmethod
    def read(cls, note: Array) -> Summary:
        """Decode a note. If it does not begin with two whole numbers the count is -1, which `Spread` refuses."""
        high, low = note[:2].tolist() if note.size >= 2 else (-1, 0)
        whole = 0 <= high < math.inf and 0 <= low < math.inf
        return cls(int(high) << _EXACT_BITS | int(low) if whole else -1, note[2:])


class Spread:
    """The points of all ranks, sorted, and the share of the set that each represents."""

    def __init__(self, rank: int, parts: Sequence[Summary], allowed: tuple[float, float], *, descending: bool) -> None:
        joined = np.concatenate([part.points for part in parts])
        _check(rank, parts, joined, allowed)
        self.counts = [part.count for part in parts]
        self.total = sum(self.counts)
        sizes = [part.points.size for part in parts]
        shares = np.repeat([count / max(size, 1) for count, size in zip(self.counts, sizes, strict=True)], sizes)
        order = np.argsort(-joined if descending else joined, kind="stable")
        self._descending = descending
        self._points = joined[order]
        self._reached = shares[order].cumsum()

    def at(self, count: float) -> Any:
        """Return the point at which the sum of shares is nearest to `count`. The set must not be empty."""
        return self._points[np.abs(self._reached - count).argmin()].item()

    def count_before(self, value: float) -> float:
        """Return about how many entries of the whole set precede `value` or are equal to it."""
        before = self._points >= value if self._descending else self._points <= value
        passed = int(before.sum())
        return float(self._reached[passed - 1]) if passed else 0.0


def _check(rank: int, parts: Sequence[Summary], joined: Array, allowed: tuple[float, float]) -> None:
    """Check the summaries of other ranks before use: they decide which indices a region has."""
    for source, part in enumerate(parts):
        if part.count < 0 or (part.count > 0) != (part.points.size > 0):
            raise MessageError(
                f"rank {rank}: rank {source} reports {part.count} entries with {part.points.size} points"
            )
    if _within(joined, allowed):
        return
    source, points = next((at, part.points) for at, part in enumerate(parts) if not _within(part.points, allowed))
    raise MessageError(
        f"rank {rank}: rank {source} reports points from {points.min()} to {points.max()}, "
        f"allowed are {allowed[0]} to {allowed[1]}"
    )


def _within(points: Array, allowed: tuple[float, float]) -> bool:
    """Return whether all points are in a range; False if any is NaN."""
    return points.size == 0 or bool(points.min() >= allowed[0] and points.max() <= allowed[1])
