"""One step of all groups: gradients arrive, groups are exchanged in their fixed order, all count or none."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradsieve.engine.engine import Engine
from gradsieve.pipeline import Exchanged
from gradsieve.stats.figures import StepStats


class Step:
    """One step. `deliver` and `ready` belong to one thread, `exchange` and `finish` to one that may be another."""

    def __init__(
        self, engine: Engine, loss_scale: float | None = None, *, joined: bool = False, withhold: bool = False
    ) -> None:
        """Begin a step whose gradients are multiplied by `loss_scale`; None keeps the last scale.

        `joined`: this rank's inputs have ended, and its gradients are zero. It sends its residual. With `withhold` it
        keeps the residual of parameters whose gradient is all zero.
        """
        engine.scale_to(loss_scale)
        self._engine = engine
        self._joined = joined
        self._withhold = withhold or engine.settings.withhold_unused
        self._densities = engine.densities()
        self._grads: list[dict[int, Tensor]] = [{} for _ in engine.groups]
        self._started = 0  # groups that `ready` has returned
        self._outcomes: list[Exchanged] = []
        self._traffic_before = replace(engine.comm.traffic)

    def deliver(self, name: str, grad: Tensor) -> int:
        """Accept a parameter's flat gradient, which the mean will overwrite. Returns the number of its group."""
        index, number = self._engine.positions[name]
        self._grads[index][number] = grad
        return index

    def ready(self) -> list[int]:
        """Return the groups that are complete and next in order, each group once."""
        first = self._started
        groups = self._engine.groups
        while self._started < len(groups) and len(self._grads[self._started]) == len(groups[self._started].slots):
            self._started += 1
        return list(range(first, self._started))

    def exchange(self, index: int) -> None:
        """Exchange a group that `ready` has returned; each group once, in that order."""
        grads, clock = self._grads[index], self._engine.clock
        ordered = [grads[number] for number in range(len(grads))]
        with clock.phase("settle"):  # the parts of the recipe enter all other phases
            self._outcomes.append(self._engine.exchange(index, ordered, self._densities[index], self._withhold))

    def finish(self) -> bool:
        """Take the new states of all groups, or of none. Returns whether the step counts, the same on every rank."""
        engine = self._engine
        counted = all(outcome.finite for outcome in self._outcomes)
        engine.stats.record(self._stats(counted))
        if counted:
            engine.commit([outcome.state for outcome in self._outcomes])
        return counted

    def _stats(self, counted: bool) -> StepStats:
        engine = self._engine
        pairs = zip(engine.groups, self._outcomes, strict=True)
        sparse = [outcome for group, outcome in pairs if group.sparse and counted]
        return StepStats(
            step=engine.steps_done,
            counted=counted,
            joined=self._joined,
            dense=all(density is None for density in self._densities),
            sparse_numel=engine.sparse_numel,
            selected_entries=sum(outcome.num_local for outcome in sparse),
            delivered_entries=sum(outcome.num_total for outcome in sparse),
            dense_bytes=engine.dense_bytes,
            traffic=engine.comm.traffic.since(self._traffic_before),
            seconds=engine.clock.take(),
        )
