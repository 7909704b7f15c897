"""Combs: a vector is cut into m combs that take turns. Comb j has every m-th entry, beginning with the j-th.

One comb is exchanged at a time, whole, so no indices are sent. A comb has single entries rather than one long window,
so that every matrix has its share in every exchange. With half of the vector as one window, half of the layers would
wait while the other half moves, and the model would learn less (docs/optimizers.md).

For the same reason a comb's entries are dealt to the ranks in turn: each rank owns every P-th of them. So each rank's
part is a sample of the whole model, with the model's mean magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.feedback import Accumulated
from gradsieve.kernels import Entries
from gradsieve.kernels import combs as compiled
from gradsieve.selectors import Selector
from gradsieve.updates.drift import Drift
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


class Comb(NamedTuple):
    """One comb, whose entries are dealt to the ranks."""

    number: int = 0
    of: int = 1  # the number of combs
    ranks: int = 1

    @classmethod
    def of_turn(cls, turn: int, density: float | None, ranks: int) -> Comb:
        """Return the comb of a turn, if a share `density` of all entries is exchanged per turn; None is all."""
        of = 1 if density is None else max(1, round(1 / density))
        return cls(turn % of, of, ranks)

    def numel(self, whole: int) -> int:
        """Return the number of the comb's entries in a vector of `whole` entries."""
        rounds, rest = divmod(whole, self.of * self.ranks)
        return rounds * self.ranks + (rest if self.number == 0 else 0)

    def gathered(self, vector: Tensor) -> Tensor:
        """Return a copy of the comb's entries."""
        values = torch.empty(self.numel(vector.numel()), dtype=vector.dtype, device=vector.device)
        if _is_compiled_for(vector):
            compiled.gather(*self._layout(vector), values.numpy())
        self._each(vector, values, lambda part, new: new.copy_(part))
        return values

    def put_in_(self, vector: Tensor, values: Tensor) -> None:
        """Overwrite the comb's entries."""
        if _is_compiled_for(vector):
            compiled.put(*self._layout(vector), values.numpy())
        self._each(vector, values, lambda part, new: part.copy_(new))

    def subtract_from_(self, vector: Tensor, values: Tensor, rate: float) -> None:
        """Subtract `rate * values` from the comb's entries."""
        if _is_compiled_for(vector):
            array = values.numpy()
            compiled.subtract(*self._layout(vector), array, array.dtype.type(rate))
        self._each(vector, values, lambda part, new: part.sub_(new, alpha=rate))

    def _layout(self, vector: Tensor) -> tuple[Any, int, int, int, int]:
        rounds = vector.numel() // (self.of * self.ranks)
        return vector.numpy(), self.number, self.of, self.ranks, rounds

    def _each(self, vector: Tensor, values: Tensor, work: Callable[[Tensor, Tensor], object]) -> None:
        """Call `work` with each view of the vector and its values, except what compiled loops have done already."""
        edge = vector.numel() - vector.numel() % (self.of * self.ranks)
        taken = edge // self.of
        if not _is_compiled_for(vector):
            part = vector[:edge].view(-1, self.ranks, self.of)[:, :, self.number].t()
            work(part, values[:taken].view(part.shape))
        if self.number == 0:  # entries after the last full round
            work(vector[edge:], values[taken:])


def _is_compiled_for(vector: Tensor) -> bool:
    return vector.device.type == "cpu" and vector.dtype in (torch.float32, torch.float64)


class CombPieces(Pieces):
    """A group's vector and the comb of it that is exchanged; by default all entries."""

    comb: Comb = Comb()


class Turn(NamedTuple):
    """The number of the next turn, the same on every rank."""

    turn: int = 0


@dataclass(frozen=True)
class TakeTurns(Selector[Turn]):
    """Selects all entries of the comb, which `CombDrift` has gathered."""

    selects_zeros = True

    @override
    def init(self, numel: int) -> Turn:
        return Turn()

    @override
    def floor(self, state: Turn) -> float | None:
        return None

    @override
    def select(self, accumulated: Tensor, k: int, state: Turn, candidates: Entries | None) -> tuple[SparseVector, Turn]:
        return SparseVector.full(accumulated), Turn(state.turn + 1)


class CombState(NamedTuple):
    """A residual, and the new residual of one comb until the exchange counts."""

    residual: Tensor
    comb: Comb = Comb()
    kept: Tensor | None = None

    def committed(self) -> CombState:
        """Write the new residual of the comb."""
        if self.kept is not None:
            self.comb.put_in_(self.residual, self.kept)
        return CombState(self.residual)


@dataclass(frozen=True)
class CombDrift(Drift):
    """`Drift` for one comb at a time. It needs no spare vector, since only the comb is copied."""

    @override
    def init(self, grad: Pieces) -> CombState:  # type: ignore[override]
        return CombState(super().init(grad).residual)

    def accumulate(  # type: ignore[override]
        self, grad: Pieces, out: Pieces, state: CombState, floor: float | None, expected: int
    ) -> Accumulated:
        """Copy the comb's residual."""
        assert isinstance(grad, CombPieces)
        return Accumulated(grad.comb.gathered(state.residual))

    def settle(  # type: ignore[override]
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: CombState
    ) -> CombState:
        """Keep the comb's new residual until the step counts."""
        assert isinstance(grad, CombPieces)
        return CombState(state.residual, grad.comb, self.left_of(accumulated, local, leftover))
