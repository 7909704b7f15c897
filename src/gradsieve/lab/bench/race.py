"""The plan of a race, `gradsieve bench train`: the run, the choices that take part, and the networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gradsieve.errors import InputError
from gradsieve.lab.bench.timed import by_local_steps, timed_choice, timed_plan
from gradsieve.lab.train.choice import DENSE, Choice
from gradsieve.lab.train.plan import Plan

TESTS = 40  # per run by default: the time to a target is known to 1/40 of the run


@dataclass(frozen=True)
class TrainPlan:
    """What to train, and where."""

    run: Plan
    choices: Sequence[Choice]
    seeds: Sequence[int]
    networks: Sequence[str]
    ranks: int
    margin: float = 0.03  # the target is dense's final loss times 1 + margin
    timed_steps: int | None = None  # timed on each network, with the training over loopback; None trains on each
    compared: Sequence[Path] = ()  # folders of comparisons with finished runs, which are then not trained again

    def __post_init__(self) -> None:
        if not any(choice.recipe == DENSE for choice in self.choices):
            raise InputError("dense must be among the recipes: its final loss is the target")
        object.__setattr__(self, "choices", self.run.checked(self.choices))
        if self.ranks < 2:
            raise InputError(f"ranks must be at least 2, or nothing is sent, got {self.ranks}")
        if not 0 <= self.margin < 1:
            raise InputError(f"margin must be in [0, 1), got {self.margin}")
        if self.compared and self.timed_steps is None:
            raise InputError("the runs of a comparison have no times on networks: give --timed-steps too")
        if self.timed_steps is not None:
            self._check_timed(self.timed_steps)

    def _check_timed(self, timed_steps: int) -> None:
        if timed_steps < 1:
            raise InputError(f"timed steps must be at least 1, got {timed_steps}")
        if self.run.steps is None:
            raise InputError("timed steps need a run whose length is given in steps, not in epochs")
        if any(choice.density is None for choice in self.choices) and self.run.resolved().sieve.warmup:
            raise InputError("timed steps need --density: in the preset's density warm-up, step times differ")

    @property
    def dense(self) -> Choice:
        """The choice whose final loss sets the target."""
        return next(choice for choice in self.choices if choice.recipe == DENSE)

    @property
    def whole(self) -> Leg:
        """All choices and seeds, trained to the end."""
        return Leg(self.run, self.choices, self.seeds, self.ranks)

    def runs(self) -> Iterator[tuple[Choice, int]]:
        """Every choice with every seed."""
        return ((choice, seed) for choice in self.choices for seed in self.seeds)

    def timed(self) -> list[Leg]:
        """A few steps of each choice; one leg for each length of the timed intervals."""
        assert self.timed_steps is not None
        choices = list(dict.fromkeys(timed_choice(choice) for choice in self.choices))
        return [
            Leg(timed_plan(self.run, self.timed_steps, local_steps), group, self.seeds[:1], self.ranks)
            for local_steps, group in by_local_steps(choices).items()
        ]


class Leg(NamedTuple):
    """A part of a race: choices that train in turns on one network."""

    run: Plan
    choices: Sequence[Choice]
    seeds: Sequence[int]
    ranks: int
