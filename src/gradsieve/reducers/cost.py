"""The cost of a reducer in closed form: messages and 4-byte words that one rank receives per step.

An entry (int32 index, float32 value) is two words. Time = messages * latency + words * seconds per word. Each reducer
states its own cost (`Reducer.cost`), and the laws check it.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The cost per rank and step, for `size` ranks that each select k of `numel` entries."""

    messages: int  # at most, in any step
    words: float  # if entries are spread evenly, as in the papers
    words_limit: float  # never exceeded, wherever the entries are
    control_words: int = 0  # at most, besides entries: points of quantiles, sizes
    handed_on: int = 0  # at most: sparse vectors that share a message with another

    @property
    def packets(self) -> int:
        """The most sparse vectors that a rank receives. Each has a header."""
        return self.messages + self.handed_on


def lower_bound_words(size: int, k: int) -> float:
    """Return the least words per rank with which any algorithm can sum `size` sparse vectors of k entries."""
    return 2 * k * (size - 1) / size


def run_words(size: int, k: int, bits: int = 32) -> float:
    """Return the words that a rank receives if all send the same run of k entries, at `bits` per value."""
    return 2 * k * bits / 32 * (size - 1) / size
