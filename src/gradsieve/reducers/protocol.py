"""The protocol of reducers: all ranks together sum their sparse vectors.

Every conserving reducer obeys this law, coordinate by coordinate, at every step:
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
    """The result of one reduction on one rank."""

    total: SparseVector  # the same on every rank, bit for bit; a sum, never a mean
    leftover: SparseVector  # undelivered entries and rounding errors that this rank must keep


class NoState(NamedTuple):
    """The state of algorithms without state."""


@dataclass(frozen=True)
class Reducer(ABC, Generic[S]):
    """Sums the sparse vectors of all ranks. Settings are frozen; the state is passed in and returned.

    Args:
        codec: How entries are sent. Fewer bits send less, and leave larger rounding errors.
    """

    codec: Codec = field(default=Codec(), kw_only=True)
    conserving: ClassVar[bool] = True
    """Whether the law holds. Only published rules kept for comparison may break it."""

    def init(self, numel: int, comm: Comm) -> S:
        """Return the state before the first step. All ranks call it together, with the same `numel`."""
        agree("numel", numel, comm)
        if numel < 1:
            raise InputError(f"rank {comm.rank}: numel must be at least 1, got {numel}")
        return self.start(numel, comm)

    def __call__(self, local: SparseVector, k: int, state: S, comm: Comm) -> tuple[Reduced, S]:
        """Sum the selected entries of all ranks, keeping about k. All ranks call it together, with the same k."""
        if not 1 <= k <= local.numel:
            raise InputError(f"rank {comm.rank}: k must be in [1, numel = {local.numel}], got {k}")
        return self.reduce(local, k, state, comm)

    @abstractmethod
    def start(self, numel: int, comm: Comm) -> S:
        """Return the state before the first step."""

    @abstractmethod
    def reduce(self, local: SparseVector, k: int, state: S, comm: Comm) -> tuple[Reduced, S]:
        """Run the algorithm. Returns the result on this rank and the next state."""

    @abstractmethod
    def cost(self, size: int, k: int, numel: int) -> Cost:
        """Return what one rank receives per step at most, for `size` ranks that each send k of `numel` entries."""

    def rescaled(self, state: S, factor: float) -> S:
        """Return the state for gradients multiplied by `factor`, as after a change of the loss scale."""
        return state

    def with_codec(self, codec: Codec) -> Reducer[S]:
        """Return the same algorithm with another codec."""
        return replace(self, codec=codec)


@dataclass(frozen=True, repr=False)
class WrappedReducer(Reducer[Any]):
    """Base of wrappers that measure a reducer. It behaves and prints as the reducer inside."""

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

    @override
    def with_codec(self, codec: Codec) -> WrappedReducer:
        return replace(self, inner=self.inner.with_codec(codec))


@dataclass(frozen=True)
class StatelessReducer(Reducer[NoState]):
    """Base of algorithms without state."""

    @override
    def start(self, numel: int, comm: Comm) -> NoState:
        return NoState()


def agree(what: str, value: int, comm: Comm) -> None:
    """Raise on every rank, listing all values, unless all ranks have the same value."""
    gathered = comm.all_gather_v(torch.tensor([value], dtype=torch.int64))
    values = [int(item) for item in torch.cat(gathered)]
    if len(set(values)) > 1:
        listed = ", ".join(f"{v} on rank {rank}" for rank, v in enumerate(values))
        raise MismatchError(f"rank {comm.rank}: {what} must be the same on all ranks, got {listed}")


def equal_bounds(span: tuple[int, int], size: int) -> tuple[int, ...]:
    """Return the bounds of `size` parts of a range of n entries, none larger than ceil(n / size)."""
    start, stop = span
    return tuple(start + (stop - start) * part // size for part in range(size + 1))
