"""No error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.feedback.accumulating import wide
from gradsieve.feedback.base import Accumulated, Feedback
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces


class NothingKept(NamedTuple):
    """The state of no feedback."""


@dataclass(frozen=True)
class NoFeedback(Feedback[NothingKept]):
    """Drops undelivered entries. For dense exchange, which has none, and as a baseline without error feedback."""

    @override
    def init(self, grad: Pieces) -> NothingKept:
        return NothingKept()

    @override
    def accumulate(
        self, grad: Pieces, out: Pieces, state: NothingKept, floor: float | None, expected: int
    ) -> Accumulated:
        if out.whole is None or out.dtype != wide(grad.dtype):
            return Accumulated(grad.copied_to(torch.empty(grad.numel, dtype=wide(grad.dtype), device=grad.device)))
        return Accumulated(out.whole if out.has_memory_of(grad) else grad.copied_to(out.whole))

    @override
    def settle(
        self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: NothingKept
    ) -> NothingKept:
        return state

    @override
    def vectors(self, state: NothingKept) -> dict[str, Tensor]:
        return {}

    @override
    def rescale_(self, state: NothingKept, factor: float) -> None:
        pass
