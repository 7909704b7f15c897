"""Sparse vectors: what selectors, reducers and feedback pass to each other."""

from gradsieve.vector.change import Change, Removed, Replaced
from gradsieve.vector.deferred import Chain, Difference, Remainder, Sum
from gradsieve.vector.rounding import Rounding
from gradsieve.vector.sparse import SparseVector
from gradsieve.vector.sums import add

__all__ = [
    "Chain",
    "Change",
    "Difference",
    "Remainder",
    "Removed",
    "Replaced",
    "Rounding",
    "SparseVector",
    "Sum",
    "add",
]
