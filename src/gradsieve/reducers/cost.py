"""What a reducer costs, in closed form: messages and 4-byte words that one rank receives per step.

An entry (int32 index, float32 value) is two words. Time = messages * latency + words * seconds per word. Each reducer
states its own cost (`Reducer.cost`), and the laws hold it to that.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """For `size` ranks that each select k of `numel` entries."""

    messages: int  # at most, in any step
    words: float  # when entries are spread evenly, as the papers count
    words_limit: float  # never exceeded, wherever the entries lie
    control_words: int = 0  # at most, besides entries: points of quantiles, sizes
    handed_on: int = 0  # sparse vectors, at most, that come along with another in one message

    @property
    def packets(self) -> int:
        """Sparse vectors that are received, at most: each has a header."""
        return self.messages + self.handed_on


def lower_bound_words(size: int, k: int) -> float:
    """No algorithm sums `size` sparse vectors of k entries with fewer words received per rank."""
    return 2 * k * (size - 1) / size


def run_words(size: int, k: int, bits: int = 32) -> float:
    """Received by a rank when all send the same run of k entries to equal regions, at so many bits per value."""
    return 2 * k * bits / 32 * (size - 1) / size
