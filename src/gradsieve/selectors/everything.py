"""No selection: all entries are sent, as in the recipe "dense". Not in the registry, since it ignores the density."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class Everything(Stateless):
    """Selects all entries, without arrays of indices."""

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        return SparseVector.full(accumulated), state
