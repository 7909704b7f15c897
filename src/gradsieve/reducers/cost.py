"""What each reducer costs, in closed form: messages and 4-byte words that one rank receives in one step.

An entry (int32 index, float32 value) is two words. Times follow as messages * latency + words * seconds per word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gradsieve.registry import Registry


class Cost(NamedTuple):
    """For `size` ranks that each pick k of `numel` entries."""

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
    """No algorithm sums `size` sparse vectors of k entries with fewer words received a rank."""
    return 2 * k * (size - 1) / size


def run_words(size: int, k: int, bits: int = 32) -> float:
    """Received by a rank when all send the same run of k entries to equal regions, at so many bits a value."""
    return 2 * k * bits / 32 * (size - 1) / size


def rounds(size: int) -> int:
    """ceil(log2 size)."""
    return (size - 1).bit_length()


def dense(size: int, k: int, numel: int) -> Cost:
    """Reduce-scatter and all-gather of everything."""
    words = 2 * numel * (size - 1) / size
    return Cost(2 * (size - 1), words, words)


def topka(size: int, k: int, numel: int) -> Cost:
    """Everybody's entries, from everybody; dense where that is smaller."""
    words = min(2 * k, numel) * (size - 1)
    return Cost(size - 1, words, words)


def topkdsa(size: int, k: int, numel: int) -> Cost:
    """A share of everybody's entries, then everybody's sums; the limit has all picks in one region.

    For runs see `run_words`.
    """
    width = -(-numel // size)
    sums = min(2 * k * size, numel)
    words = min(2 * k, numel) * (size - 1) / size + sums * (size - 1) / size
    return Cost(2 * (size - 1), words, min(2 * k, width) * (size - 1) + min(sums, width * (size - 1)))


def gtopk(size: int, k: int, numel: int) -> Cost:
    """The root hears from a child in every round; every other rank from fewer children, and its parent."""
    words = min(2 * k, numel) * rounds(size)
    return Cost(rounds(size), words, words)


def oktopk(size: int, k: int, numel: int) -> Cost:
    """A balanced share of everybody's entries, then about k sums.

    6k(P-1)/P bounds the words while regions and threshold fit. The limit holds also when the gradient has just changed
    altogether: then one region may get all picks, and all sums may reach the threshold, at the owners and balanced.
    """
    share = (size - 1) / size
    sums = min(2 * k * size, numel)
    regions, threshold = 2 + 16 * size, 2 * (2 + 128)
    return Cost(
        6 * (size - 1),
        4 * k * share,
        min(2 * k, numel) * (size - 1) + 2 * sums,
        (size - 1) * (regions + threshold + 2),
    )


def spardl(size: int, k: int, numel: int) -> Cost:
    """P-1 blocks of ceil(k/P) entries to be summed, and as many summed ones."""
    words = 4 * -(-k // size) * (size - 1)
    blocks = size - 1  # gathered, each with its size in front
    return Cost(2 * rounds(size), words, words, control_words=2 * blocks, handed_on=blocks)


COSTS: Registry[Callable[[int, int, int], Cost]] = Registry(
    "cost",
    {
        "dense": dense,
        "topka": topka,
        "topkdsa": topkdsa,
        "gtopk": gtopk,
        "gtopk_paper": gtopk,
        "oktopk": oktopk,
        "spardl": spardl,
    },
)
