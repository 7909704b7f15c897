"""A vector that is mostly zero: the currency between selectors, reducers and feedback."""

from gradsieve.vector.deferred import Chain, Difference, Remainder, Sum
from gradsieve.vector.sparse import SparseVector
from gradsieve.vector.sums import add

__all__ = ["Chain", "Difference", "Remainder", "SparseVector", "Sum", "add"]
