"""One step of all groups: gradients are delivered, groups are exchanged in their fixed order, all count or none."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradsieve.engine.engine import Engine
from gradsieve.pipeline import Exchanged
from gradsieve.stats.figures import StepStats


class Step:
    """One step under way. `deliver` and `ready` are called by one thread, `exchange` and `finish` by one thread."""

    def __init__(
        self, engine: Engine, loss_scale: float | None = None, *, joined: bool = False, withhold: bool = False
    ) -> None:
        """Begin a step whose gradients are `loss_scale` times as large as the loss says; None is as before.

        `joined`: this rank's inputs have ended and its gradients are zero. It delivers its residual, except, with
        `withhold`, that of parameters whose gradient is all zero.
        """
        engine.scale_to(loss_scale)
        self._engine = engine
        self._joined = joined
        self._withhold = withhold or engine.settings.withhold_unused
        self._densities = engine.densities()
        self._grads: list[dict[int, Tensor]] = [{} for _ in engine.groups]
        self._started = 0  # groups that `ready` has named
        self._outcomes: list[Exchanged] = []
        self._traffic_before = replace(engine.comm.traffic)

    def deliver(self, name: str, grad: Tensor) -> int:
        """A parameter's flat gradient, to be overwritten with the mean; the number of its group comes back."""
        index, number = self._engine.positions[name]
        self._grads[index][number] = grad
        return index

    def ready(self) -> list[int]:
        """The groups that have become complete, and whose turn it is."""
        first = self._started
        groups = self._engine.groups
        while self._started < len(groups) and len(self._grads[self._started]) == len(groups[self._started].slots):
            self._started += 1
        return list(range(first, self._started))

    def exchange(self, index: int) -> None:
        """Exchange a group that `ready` has named; each once, in that order."""
        grads, clock = self._grads[index], self._engine.clock
        ordered = [grads[number] for number in range(len(grads))]
        with clock.phase("settle"):  # the recipe's parts tell of all others
            self._outcomes.append(self._engine.exchange(index, ordered, self._densities[index], self._withhold))

    def finish(self) -> bool:
        """After all groups: take on their new states, or none. Whether the step counted, the same on every rank."""
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
