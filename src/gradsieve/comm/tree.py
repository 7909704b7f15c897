"""The binomial tree rooted at rank 0: log P rounds up or down reach every rank."""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """A rank's neighbours in the tree."""

    parent: int | None
    children: tuple[int, ...]  # in the order they are merged


def node(rank: int, size: int) -> Node:
    """Rank r hangs below r minus its lowest set bit; its children are r + 1, r + 2, r + 4, ... below that bit."""
    children = []
    distance = 1
    while rank % (2 * distance) == 0 and distance < size:
        if rank + distance < size:
            children.append(rank + distance)
        distance *= 2
    return Node(None if rank == 0 else rank - distance, tuple(children))


def num_rounds(size: int) -> int:
    """ceil(log2 size)."""
    return (size - 1).bit_length()
