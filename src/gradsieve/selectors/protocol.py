"""What a selector is: it decides, locally, which entries of the accumulated gradient are sent.

Whatever the rule, indices come sorted and unique. A rule that goes by magnitude never selects zeros, and always selects
entries that are not finite. A rule that goes by position (`selects_zeros`) sends a NaN if an entry anywhere is not
finite. Either way a NaN on one rank reaches every rank in the exchange itself, and all can agree to skip the step.
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
    """Dense to sparse, about k of n. Settings are frozen; state goes in and comes out."""

    selects_zeros: ClassVar[bool] = False
    """Whether entries are selected for their position: zeros among them are sent, too."""

    @abstractmethod
    def init(self, numel: int) -> S:
        """The state before the first step."""

    @abstractmethod
    def floor(self, state: S) -> float | None:
        """A magnitude below which this step will likely pick nothing; None if there is no telling.

        Feedback collects the entries above it in the pass that adds the gradient in, which spares a pass here.
        """

    def __call__(
        self, accumulated: Tensor, k: int, state: S, candidates: Entries | None = None
    ) -> tuple[SparseVector, S]:
        """The picked entries. `candidates`: all that are not below `floor(state)`, if they have been collected."""
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
        """The rule."""

    def rescaled(self, state: S, factor: float) -> S:
        """The state for gradients `factor` times as large as they were, as after a change of the loss scale."""
        return state


class NoState(NamedTuple):
    """Nothing to remember."""


class Stateless(Selector[NoState]):
    """Base of rules that look at the present only."""

    @override
    def init(self, numel: int) -> NoState:
        return NoState()

    @override
    def floor(self, state: NoState) -> float | None:
        return None


@dataclass(frozen=True, repr=False)
class WrappedSelector(Selector[Any]):
    """Does and prints as the selector inside: base of those that measure it."""

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
