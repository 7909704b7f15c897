"""Chooses between recipes for gradients, one of which sends everything.

Residuals stay with their parameters when the recipe changes. The first dense step delivers them. After it there is no
residual, and DDP's own process group can sum the buckets, as without a hook (`is_plain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from gradsieve.auto import Candidate, Decision
from gradsieve.engine.engine import Engine
from gradsieve.recipes import Recipe, recipe

SPARSE_NAMES = ("oktopk", "topka")
"""The recipes that "auto" chooses from, besides dense. The one that sends least is the first. TopkA needs
fewer messages, and its traffic grows with the number of ranks."""


def other_recipes() -> tuple[Recipe, ...]:
    """Return the recipes of `SPARSE_NAMES` after the first, for `Settings.others`."""
    return tuple(recipe(name) for name in SPARSE_NAMES[1:])


class GradientDecision(Decision):
    """The decision for one model on one rank. All ranks make it together, since it communicates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        settings = engine.settings
        self._can_be_plain = not settings.withhold_unused and settings.local_clip_norm is None
        self.is_plain = False  # whether the present step is summed without a residual
        self._is_delivered = False  # whether no rank has a residual
        self._dense = len(engine.recipes)  # the number of the candidate
        candidates = [*map(Candidate, SPARSE_NAMES), Candidate("dense", True, engine.dense_bytes)]
        super().__init__(candidates, engine.comm, engine.groups[0].device, engine.stats)
        self.apply()

    @override
    def record(self) -> None:
        engine, last = self._engine, self._engine.stats.last
        self._is_delivered = engine.uses_dense and last is not None and last.dense and last.counted
        if not engine.sends_all:  # a dense phase that the user or the schedule asked for says nothing
            super().record()

    def apply(self) -> None:
        """Let the engine make the next step as the chooser says."""
        engine = self._engine
        is_dense = self.chooser.current == self._dense
        self.is_plain = is_dense and self._is_delivered and self._can_be_plain and not engine.sends_all
        if is_dense:
            engine.use_dense(is_clear=self.is_plain)
        else:
            engine.use(self.chooser.current)

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "is_delivered": self._is_delivered}

    @override
    def load(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        super().load(state, same_ranks=same_ranks)
        self._is_delivered = state["is_delivered"]
        self.apply()
