"""Chooses between two ways to train one model: sparse updates, or dense gradients, as DDP exchanges them by itself.

Sparse: each rank steps on its own gradient, and the updates are exchanged between two steps.
Dense: DDP's process group sums the gradients during backward, and all ranks take the same step.

To go from sparse to dense, the residuals are delivered whole, and the optimizer states are averaged over the ranks. All
replicas are the same then. To go back, each rank continues from the common state. Nothing is lost either way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from gradsieve.auto import Candidate, Decision
from gradsieve.updates.averaging import average_, can_average, scale_second_moments_
from gradsieve.updates.engine import UpdateEngine
from gradsieve.updates.model import LocalModel
from gradsieve.updates.own import OwnGradients

DENSE = 1  # the number of the candidate

_log = logging.getLogger("gradsieve")


class UpdateDecision(Decision):
    """The decision for one model on one rank. All ranks make it together, since it communicates."""

    def __init__(self, engine: UpdateEngine, local: LocalModel, optimizer: Optimizer, sparse_name: str) -> None:
        self.is_dense = False  # how the present step is exchanged
        self._engine, self._local, self._optimizer = engine, local, optimizer
        candidates = Candidate(sparse_name), Candidate("dense", True, engine.dense_bytes)
        super().__init__(candidates, engine.comm, engine.groups[0].device, engine.stats)

    @override
    def record(self) -> None:
        if not self._engine.sends_all:  # a dense phase that the user or the schedule asked for says nothing
            super().record()

    @property
    def wants_change(self) -> bool:
        """Whether the next step is to be exchanged the other way; the same on all ranks."""
        return (self.chooser.current == DENSE) != self.is_dense

    def change(self, *, joined: bool = False) -> None:
        """Change the way. The updates of the last step have not been exchanged yet. All ranks call it together."""
        if self.is_dense:
            scale_second_moments_(self._optimizer, self._local.parameters, self._engine.comm.size, back=True)
            self._set(is_dense=False)
        elif self._engine.deliver_all(joined=joined):
            self._local.exchanged()
            self._to_dense()

    def _to_dense(self) -> None:
        with self._engine.comm.aside() as beside:
            if can_average(self._optimizer, self._local.parameters, beside):
                average_(self._optimizer, self._local.parameters, beside)
                self._set(is_dense=True)
                return
        self.chooser.exclude(DENSE)
        _log.warning("gradsieve: dense gradients are not tried, because the optimizer's states cannot be averaged")

    def _set(self, *, is_dense: bool) -> None:
        self.is_dense = is_dense
        if is_dense:
            self._local.pause()
        else:
            self._local.resume()
        if isinstance(self._optimizer, OwnGradients):
            self._optimizer.for_ranks(1 if is_dense else self._engine.comm.size)

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "is_dense": self.is_dense}

    @override
    def load(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        super().load(state, same_ranks=same_ranks)
        if state["is_dense"] != self.is_dense:
            self._set(is_dense=state["is_dense"])
