"""No selection: every entry is sent. The dense recipe's selector; not in the registry, since it knows no density."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradsieve.kernels import Entries
from gradsieve.selectors.protocol import NoState, Stateless
from gradsieve.vector import SparseVector


@dataclass(frozen=True)
class Everything(Stateless):
    """Passes the dense vector on, without index arrays."""

    @override
    def select(
        self, accumulated: Tensor, k: int, state: NoState, candidates: Entries | None
    ) -> tuple[SparseVector, NoState]:
        return SparseVector.full(accumulated), state
