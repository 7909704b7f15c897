"""What a race of training is: the run, who takes part, and on which networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gradsieve.errors import InputError
from gradsieve.lab.bench.timed import by_local_steps, timed_exchange, timed_plan
from gradsieve.lab.train.exchange import DENSE, Exchange
from gradsieve.lab.train.plan import Plan

TESTS = 40  # in a run, unless asked for otherwise: a time to a target is known to 1/40 of it


@dataclass(frozen=True)
class TrainPlan:
    """What to race."""

    run: Plan
    exchanges: Sequence[Exchange]
    seeds: Sequence[int]
    networks: Sequence[str]
    ranks: int
    margin: float = 0.03  # of the loss dense ends at, that a target lies above it
    timed_steps: int | None = None  # on each network, where the loss is trained on loopback; None trains on each
    compared: Sequence[Path] = ()  # folders of comparisons that have the runs already; none trains them

    def __post_init__(self) -> None:
        if not any(exchange.recipe == DENSE for exchange in self.exchanges):
            raise InputError("dense has to be among the recipes: the target is what it reaches")
        self.run.check_with(self.exchanges)
        if self.ranks < 2:
            raise InputError(f"ranks must be at least 2, or nothing is sent, got {self.ranks}")
        if not 0 <= self.margin < 1:
            raise InputError(f"margin must be in [0, 1), got {self.margin}")
        if self.compared and self.timed_steps is None:
            raise InputError("runs of a comparison have no times on networks: give --timed-steps too")
        if self.timed_steps is not None:
            if self.timed_steps < 1:
                raise InputError(f"timed steps must be at least 1, got {self.timed_steps}")
            if self.run.steps is None:
                raise InputError("timed steps need the number of steps of a run, not of epochs")
            if any(each.density is None for each in self.exchanges) and self.run.resolved().sieve.warmup:
                raise InputError(
                    "timed steps need --density: with the preset's warm-up no step takes as long as others"
                )

    @property
    def dense(self) -> Exchange:
        """Whose loss is the target."""
        return next(exchange for exchange in self.exchanges if exchange.recipe == DENSE)

    @property
    def whole(self) -> Leg:
        """All of it."""
        return Leg(self.run, self.exchanges, self.seeds, self.ranks)

    def runs(self) -> Iterator[tuple[Exchange, int]]:
        """Every exchange with every seed."""
        return ((exchange, seed) for exchange in self.exchanges for seed in self.seeds)

    def timed(self) -> list[Leg]:
        """A few steps of each exchange, in groups whose stretches of steps are equally long."""
        assert self.timed_steps is not None
        exchanges = list(dict.fromkeys(timed_exchange(exchange) for exchange in self.exchanges))
        return [
            Leg(timed_plan(self.run, self.timed_steps, local_steps), group, self.seeds[:1], self.ranks)
            for local_steps, group in by_local_steps(exchanges).items()
        ]


class Leg(NamedTuple):
    """What a network trains: some exchanges in turns."""

    run: Plan
    exchanges: Sequence[Exchange]
    seeds: Sequence[int]
    ranks: int
