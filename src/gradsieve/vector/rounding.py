"""What rounding a message costs: the vector that was given, and the vector that its receivers decode."""

from __future__ import annotations

from typing import NamedTuple

from gradsieve.kernels import kernels
from gradsieve.vector.change import Replaced
from gradsieve.vector.deferred import Difference, Remainder
from gradsieve.vector.sparse import SparseVector


class Rounding(NamedTuple):
    """A vector as its sender has it, and as the receivers of its message decode it."""

    given: SparseVector
    decoded: SparseVector  # at the same indices
    exact: bool = False  # whether the message keeps every bit of every value, so that the two are equal

    @classmethod
    def none(cls, vector: SparseVector) -> Rounding:
        """Of a vector that is sent as it is, or not sent at all."""
        return cls(vector, vector, exact=True)

    @property
    def error(self) -> SparseVector:
        """`given - decoded`. The error of a run is a run, zeros included, and is computed only when it is read."""
        given, decoded, exact = self
        if exact:
            return SparseVector.empty(given.numel, given.values)
        if given.is_run:
            return Difference(given, decoded)
        return SparseVector.trusted(kernels(given.values).difference(given.entries, decoded.values), given.numel)

    def undelivered(self, total: SparseVector) -> SparseVector:
        """What the sender keeps, if `total` is the result of the reduction.

        Entries that are not in `total` are kept whole. Of the others the rounding error is kept.
        """
        given, decoded, exact = self
        if exact:
            return given.without(total)
        if total.covers(given):
            return self.error
        errors = kernels(given.values).difference_at(given.entries, decoded.values, total.indices)
        return Remainder(given, Replaced(*errors))
