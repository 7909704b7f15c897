"""A vector cut into lanes that take turns: lane j of m has every m-th entry, beginning with the j-th.

One lane is exchanged at a time, whole, so no indices are sent. Single entries rather than one long window per turn:
every matrix then has its share in every exchange. With half of the vector as one window, half of the layers wait while
the other half moves, and some of the learning is lost (docs/optimizers.md).

For the same reason a lane's entries are dealt to the ranks in turn: each rank owns every P-th of them. Each rank's part
is then a sample of the whole model, and its mean magnitude is that of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.kernels import Entries
from gradsieve.pieces import Pieces
from gradsieve.selectors import Selector
from gradsieve.updates.drift import Drift
from gradsieve.vector import SparseVector


class Lane(NamedTuple):
    """One of several lanes, dealt to some ranks."""

    number: int = 0
    of: int = 1  # how many there are
    ranks: int = 1

    @classmethod
    def of_turn(cls, turn: int, density: float | None, ranks: int) -> Lane:
        """The lane whose turn it is when a share `density` of all entries is exchanged at a time; None is all."""
        of = 1 if density is None else max(1, round(1 / density))
        return cls(turn % of, of, ranks)

    def parts(self, vector: Tensor) -> Iterator[Tensor]:
        """Views of the lane's entries, owner by owner. What is beyond the last full round belongs to lane 0."""
        edge = vector.numel() - vector.numel() % (self.of * self.ranks)
        yield vector[:edge].view(-1, self.ranks, self.of)[:, :, self.number].t()
        if self.number == 0:
            yield vector[edge:]

    def numel(self, whole: int) -> int:
        """Entries of the lane of a vector of `whole` entries."""
        rounds, rest = divmod(whole, self.of * self.ranks)
        return rounds * self.ranks + (rest if self.number == 0 else 0)

    def gathered(self, vector: Tensor) -> Tensor:
        """The lane's entries in memory of their own."""
        return torch.cat([part.reshape(-1) for part in self.parts(vector)])

    def pairs(self, vector: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The lane's views of a vector, each with its part of `values` in the same shape."""
        start = 0
        for part in self.parts(vector):
            yield part, values[start : start + part.numel()].view(part.shape)
            start += part.numel()

    def put_in_(self, vector: Tensor, values: Tensor) -> None:
        """Overwrite the lane's entries."""
        for part, new in self.pairs(vector, values):
            part.copy_(new)


class LanePieces(Pieces):
    """A group's vector of which one lane is exchanged; without a lane, all of it."""

    lane: Lane = Lane()


class Turn(NamedTuple):
    """The same on every rank."""

    turn: int = 0


@dataclass(frozen=True)
class TakeTurns(Selector[Turn]):
    """Selects all of the lane whose turn it is, which `LaneDrift` has gathered."""

    selects_zeros = True

    def init(self, numel: int) -> Turn:
        """See `Selector.init`."""
        return Turn()

    def floor(self, state: Turn) -> float | None:
        """See `Selector.floor`."""
        return None

    def select(self, accumulated: Tensor, k: int, state: Turn, candidates: Entries | None) -> tuple[SparseVector, Turn]:
        """See `Selector.select`."""
        return SparseVector.full(accumulated), Turn(state.turn + 1)


class LaneState(NamedTuple):
    """A residual, and what an exchange that does not count yet has left over of one lane."""

    residual: Tensor
    lane: Lane = Lane()
    kept: Tensor | None = None

    def committed(self) -> LaneState:
        """Take on what was left over."""
        if self.kept is not None:
            self.lane.put_in_(self.residual, self.kept)
        return LaneState(self.residual)


@dataclass(frozen=True)
class LaneDrift(Drift):
    """`Drift` for one lane at a time: it needs no spare, since only the lane is copied."""

    def init(self, grad: Pieces) -> LaneState:  # type: ignore[override]
        """See `Feedback.init`."""
        return LaneState(super().init(grad).residual)

    def accumulate(  # type: ignore[override]
        self, grad: Pieces, out: Pieces, state: LaneState, floor: float | None, expected: int
    ) -> tuple[Tensor, Entries | None]:
        """A copy of the lane's residual."""
        assert isinstance(grad, LanePieces)
        return grad.lane.gathered(state.residual), None

    def settle(  # type: ignore[override]
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: LaneState
    ) -> LaneState:
        """What is left over replaces the lane's residual once the step counts."""
        assert isinstance(grad, LanePieces)
        return LaneState(state.residual, grad.lane, self.left_of(accumulated, local, leftover))
