"""The protocol of selectors: each decides, on one rank, which entries of the accumulated gradient are sent.

Indices are always sorted and unique. A rule by magnitude never selects zeros, and always selects entries that are not
finite. A rule by position (`selects_zeros`) sends a NaN if any entry of the vector is not finite. Either way a NaN on
one rank reaches all ranks in the exchange itself, and all skip the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.kernels import Entries
from gradsieve.vector import SparseVector

S = TypeVar("S")


class Selector(ABC, Generic[S]):
    """Selects about k of n entries. Settings are frozen; the state is passed in and returned."""

    selects_zeros: ClassVar[bool] = False
    """Whether entries are selected by position, zeros included."""

    @abstractmethod
    def init(self, numel: int) -> S:
        """Return the state before the first step."""

    @abstractmethod
    def floor(self, state: S) -> float | None:
        """Return a magnitude below which this step will likely select nothing; None if it is unknown.

        Feedback collects the entries above it in the pass that adds the gradient, which saves a pass here.
        """

    def __call__(
        self, accumulated: Tensor, k: int, state: S, candidates: Entries | None = None
    ) -> tuple[SparseVector, S]:
        """Return the selected entries. `candidates` are all entries not below `floor(state)`, if collected."""
        if accumulated.dim() != 1 or not accumulated.dtype.is_floating_point or not accumulated.is_contiguous():
            raise InputError(
                f"a selector needs a 1-D, contiguous, floating point tensor, got shape {tuple(accumulated.shape)}, "
                f"stride {accumulated.stride()}, {accumulated.dtype}"
            )
        if not 1 <= k <= accumulated.numel():
            raise InputError(f"k must be in [1, numel = {accumulated.numel()}], got {k}")
        return self.select(accumulated, k, state, candidates)

    @abstractmethod
    def select(self, accumulated: Tensor, k: int, state: S, candidates: Entries | None) -> tuple[SparseVector, S]:
        """Apply the rule. Returns the selected entries and the next state."""

    def rescaled(self, state: S, factor: float) -> S:
        """Return the state for gradients multiplied by `factor`, as after a change of the loss scale."""
        return state


class NoState(NamedTuple):
    """The state of rules without state."""


class Stateless(Selector[NoState]):
    """Base of rules without state."""

    @override
    def init(self, numel: int) -> NoState:
        return NoState()

    @override
    def floor(self, state: NoState) -> float | None:
        return None


@dataclass(frozen=True, repr=False)
class WrappedSelector(Selector[Any]):
    """Base of wrappers that measure a selector. It behaves and prints as the selector inside."""

    inner: Selector[Any]

    def __repr__(self) -> str:
        return repr(self.inner)

    @override
    def init(self, numel: int) -> Any:
        return self.inner.init(numel)

    @override
    def floor(self, state: Any) -> float | None:
        return self.inner.floor(state)

    @override
    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Entries | None) -> tuple[SparseVector, Any]:
        return self.inner.select(accumulated, k, state, candidates)

    @override
    def rescaled(self, state: Any, factor: float) -> Any:
        return self.inner.rescaled(state, factor)
