"""Quantiles of a set that is spread over ranks, from a few evenly spaced points of each rank's part.

Each rank tells some of its sorted values, every one standing in the middle of an equal share of its part, and all
compute the same answer from all points. A count read off them is off by at most half a share of every rank's part; the
errors of different ranks are independent, so they mostly cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsieve.errors import MessageError

Array = np.ndarray[Any, np.dtype[Any]]

_EXACT_BITS = 24  # whole numbers up to so many bits are float32


def point_ranks(count: int, num_points: int) -> Array:
    """Positions in the middle of each of `num_points` equal shares of `count` sorted entries, if any."""
    return (2 * np.arange(num_points if count else 0, dtype=np.int64) + 1) * count // (2 * num_points)


@dataclass(frozen=True)
class Summary:
    """One rank's part: how many entries it has, and its points."""

    count: int
    points: Array

    def note(self) -> Array:
        """As float32 numbers; the count in two of them, or it would be rounded."""
        note = np.empty(2 + self.points.size, np.float32)
        note[:2] = self.count >> _EXACT_BITS, self.count & (1 << _EXACT_BITS) - 1
        note[2:] = self.points
        return note

    @classmethod
    def read(cls, note: Array) -> Summary:
        """What a note says; without two whole numbers in front the count is -1, which `Spread` refuses."""
        high, low = note[:2].tolist() if note.size >= 2 else (-1, 0)
        whole = 0 <= high < math.inf and 0 <= low < math.inf
        return cls(int(high) << _EXACT_BITS | int(low) if whole else -1, note[2:])


class Spread:
    """The points of all ranks, sorted, with the share of the set each stands for."""

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
        """The point at which the shares so far come nearest to `count`; there must be any entries at all."""
        return self._points[np.abs(self._reached - count).argmin()].item()

    def count_before(self, value: float) -> float:
        """About how many entries of the whole set come before `value`, or are equal to it."""
        before = self._points >= value if self._descending else self._points <= value
        passed = int(before.sum())
        return float(self._reached[passed - 1]) if passed else 0.0


def _check(rank: int, parts: Sequence[Summary], joined: Array, allowed: tuple[float, float]) -> None:
    """What the others tell decides where entries may lie: it is looked at before it is used."""
    for source, part in enumerate(parts):
        if part.count < 0 or (part.count > 0) != (part.points.size > 0):
            raise MessageError(
                f"rank {rank}: rank {source} tells of {part.count} entries with {part.points.size} points"
            )
    if _within(joined, allowed):
        return
    source, points = next((at, part.points) for at, part in enumerate(parts) if not _within(part.points, allowed))
    raise MessageError(
        f"rank {rank}: rank {source} tells of points from {points.min()} to {points.max()}, "
        f"allowed are {allowed[0]} to {allowed[1]}"
    )


def _within(points: Array, allowed: tuple[float, float]) -> bool:
    """False also for NaN."""
    return points.size == 0 or bool(points.min() >= allowed[0] and points.max() <= allowed[1])
