"""The protocol of error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces

F = TypeVar("F")


class Accumulated(NamedTuple):
    """The vector from which a step selects."""

    vector: Tensor  # residual plus gradient
    candidates: Entries | None = None  # its entries not below the floor, if they were collected
    out_is_clear: bool = False  # whether the vector for the mean is all zero now


class Feedback(Protocol[F]):
    """Adds the residual to gradients before the selection, and computes the new residual after the reduction."""

    def init(self, grad: Pieces) -> F:
        """Return the state before the first step, for gradients like `grad`."""
        ...

    def accumulate(self, grad: Pieces, out: Pieces, state: F, floor: float | None, expected: int) -> Accumulated:
        """Return the vector to select from. With a floor, also its entries not below it, about `expected`.

        The mean will be written to `out`, whose memory is free until then. It may be the memory of `grad`, whose
        values are then lost.
        """
        ...

    def settle(self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: F) -> F:
        """Return the state after a step in which `local` was sent and `leftover` was not delivered.

        `state` is not changed. Of `grad` only the ranges of its pieces are used: its values have been overwritten.
        """
        ...

    def vectors(self, state: F) -> dict[str, Tensor]:
        """Return the vectors of the state by name, which a checkpoint must keep."""
        ...

    def rescale_(self, state: F, factor: float) -> None:
        """Multiply the state by `factor`, as later gradients are after a change of the loss scale."""
        ...


@dataclass(frozen=True, repr=False)
class WrappedFeedback(Feedback[Any]):
    """Base of wrappers that measure feedback. It behaves and prints as the feedback inside."""

    inner: Feedback[Any]

    def __repr__(self) -> str:
        return repr(self.inner)

    @override
    def init(self, grad: Pieces) -> Any:
        return self.inner.init(grad)

    @override
    def accumulate(self, grad: Pieces, out: Pieces, state: Any, floor: float | None, expected: int) -> Accumulated:
        return self.inner.accumulate(grad, out, state, floor, expected)

    @override
    def settle(self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: Any) -> Any:
        return self.inner.settle(accumulated, grad, local, leftover, state)

    @override
    def vectors(self, state: Any) -> dict[str, Tensor]:
        return self.inner.vectors(state)

    @override
    def rescale_(self, state: Any, factor: float) -> None:
        self.inner.rescale_(state, factor)
