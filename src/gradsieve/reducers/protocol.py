"""What a reducer is: all ranks together sum the sparse vectors they picked.

The law every conserving reducer obeys, coordinate by coordinate, at every step:
`sum over ranks of local == total + sum over ranks of leftover`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.errors import InputError, MismatchError
from gradsieve.reducers.cost import Cost
from gradsieve.vector import SparseVector
from gradsieve.wire import Codec

S = TypeVar("S")


class Reduced(NamedTuple):
    """What a reduction gives each rank."""

    total: SparseVector  # the same on every rank, bit for bit; a sum, never a mean
    leftover: SparseVector  # what this rank must keep


class NoState(NamedTuple):
    """For algorithms that remember nothing between steps."""


@dataclass(frozen=True)
class Reducer(ABC, Generic[S]):
    """Sparse to sparse, over all ranks. Settings are frozen; state goes in and comes out."""

    codec: Codec = field(default=Codec(), kw_only=True)  # how entries travel; fewer bits send less, leave more over
    conserving: ClassVar[bool] = True
    """Whether the law holds; only published rules kept for comparison may break it."""

    def init(self, numel: int, comm: Comm) -> S:
        """The state before the first step. All ranks call it together, and agree on `numel`."""
        agree("numel", numel, comm)
        if numel < 1:
            raise InputError(f"rank {comm.rank}: numel must be at least 1, got {numel}")
        return self.start(numel, comm)

    def __call__(self, local: SparseVector, k: int, state: S, comm: Comm) -> tuple[Reduced, S]:
        """Sum what all ranks picked, keeping about k entries; all ranks call it together with the same k."""
        if not 1 <= k <= local.numel:
            raise InputError(f"rank {comm.rank}: k must be in [1, numel = {local.numel}], got {k}")
        return self.reduce(local, k, state, comm)

    @abstractmethod
    def start(self, numel: int, comm: Comm) -> S:
        """The state before the first step."""

    @abstractmethod
    def reduce(self, local: SparseVector, k: int, state: S, comm: Comm) -> tuple[Reduced, S]:
        """The algorithm."""

    @abstractmethod
    def cost(self, size: int, k: int, numel: int) -> Cost:
        """What one rank receives per step at most, for `size` ranks that each send k of `numel` entries."""

    def rescaled(self, state: S, factor: float) -> S:
        """The state for gradients `factor` times as large as they were, as after a change of the loss scale."""
        return state

    def with_codec(self, codec: Codec) -> Reducer[S]:
        """The same algorithm, whose entries travel by another codec."""
        return replace(self, codec=codec)


@dataclass(frozen=True, repr=False)
class WrappedReducer(Reducer[Any]):
    """Does and prints as the reducer inside: base of those that measure it."""

    inner: Reducer[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", self.inner.codec)

    def __repr__(self) -> str:
        return repr(self.inner)

    @override
    def start(self, numel: int, comm: Comm) -> Any:
        return self.inner.start(numel, comm)

    @override
    def reduce(self, local: SparseVector, k: int, state: Any, comm: Comm) -> tuple[Reduced, Any]:
        return self.inner.reduce(local, k, state, comm)

    @override
    def rescaled(self, state: Any, factor: float) -> Any:
        return self.inner.rescaled(state, factor)

    @override
    def cost(self, size: int, k: int, numel: int) -> Cost:
        return self.inner.cost(size, k, numel)

    def with_codec(self, codec: Codec) -> WrappedReducer:
        """See `Reducer.with_codec`: the reducer inside is the one that packs."""
        return replace(self, inner=self.inner.with_codec(codec))


@dataclass(frozen=True)
class StatelessReducer(Reducer[NoState]):
    """Base of algorithms that remember nothing."""

    @override
    def start(self, numel: int, comm: Comm) -> NoState:
        return NoState()


def agree(what: str, value: int, comm: Comm) -> None:
    """Raise on every rank, naming who differs, unless all ranks have the same value."""
    gathered = comm.all_gather_v(torch.tensor([value], dtype=torch.int64))
    values = [int(item) for item in torch.cat(gathered)]
    if len(set(values)) > 1:
        listed = ", ".join(f"{v} on rank {rank}" for rank, v in enumerate(values))
        raise MismatchError(f"rank {comm.rank}: {what} must be the same on all ranks, got {listed}")


def equal_bounds(span: tuple[int, int], size: int) -> tuple[int, ...]:
    """Cut a range of n entries into `size` parts, none larger than ceil(n / size)."""
    start, stop = span
    return tuple(start + (stop - start) * part // size for part in range(size + 1))
