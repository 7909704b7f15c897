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
    """What is selected from in a step."""

    vector: Tensor  # residual plus gradient
    candidates: Entries | None = None  # its entries that are not below the floor, if they were collected
    out_is_clear: bool = False  # whether the vector that the mean is written to is all zero now


class Feedback(Protocol[F]):
    """Accumulates gradients into what is selected from, and settles what becomes of it."""

    def init(self, grad: Pieces) -> F:
        """The state before the first step, for gradients like this one."""
        ...

    def accumulate(self, grad: Pieces, out: Pieces, state: F, floor: float | None, expected: int) -> Accumulated:
        """The vector to select from; with a floor, also its entries that are not below it, about `expected`.

        `out` is where the result of the step will be written, and free to be used until then; it may be `grad` itself,
        whose values are gone then.
        """
        ...

    def settle(self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: F) -> F:
        """The state after a step in which `local` was sent and `leftover` came back; `state` itself stays as it is.

        Of `grad` only the places still count: its values have been overwritten.
        """
        ...

    def vectors(self, state: F) -> dict[str, Tensor]:
        """What is remembered of each entry, by name: what a checkpoint must keep."""
        ...

    def rescale_(self, state: F, factor: float) -> None:
        """Gradients come `factor` times as large from now on, and so must what is owed of them."""
        ...


@dataclass(frozen=True, repr=False)
class WrappedFeedback(Feedback[Any]):
    """Does and prints as the feedback inside: base of those that measure it."""

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
