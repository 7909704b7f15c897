"""How gradients travel in a run: recipes by name, those without error feedback among them, and torch's own hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsieve.engine.schedules import Constant, Schedule, Steps
from gradsieve.errors import InputError
from gradsieve.feedback import MomentumResidual, NoFeedback, Residual
from gradsieve.lab.peers import PEERS, Peer
from gradsieve.lab.workloads.optimizer import OptimizerSetting, Sgd
from gradsieve.lab.workloads.workload import Preset
from gradsieve.recipes import OWN, RECIPES, Recipe, recipe
from gradsieve.registry import Registry
from gradsieve.updates import DILOCO, SPARSELOCO, Outer
from gradsieve.updates.defaults import DEFAULT_UPDATE_DENSITY

DENSE = "dense"
ONEBIT = "onebit"
WITHOUT = "-nofeedback"
CORRECTED = "-momentum"
PLAIN = "-nomomentum"
LAZY = "-lazy"
UPDATES = "-updates"
VARIANTS = (WITHOUT, CORRECTED, PLAIN, LAZY, UPDATES)
DENSE_VARIANTS = (PLAIN, LAZY)
LOCAL_STEPS = (2, 4, 8, 16, 32, 64, 128)
LOCAL: dict[str, Outer] = {
    **{f"diloco-{steps}": DILOCO.every(steps) for steps in LOCAL_STEPS},
    **{f"local-adam-{steps}": Outer(local_steps=steps) for steps in LOCAL_STEPS},
}
"""Baselines that average the models of so many local steps densely, with the optimizer as it is."""
SPARSELOCO_DENSITY = 1 / 64
PUBLISHED_LOCAL = {f"sparseloco-{steps}": SPARSELOCO.every(steps) for steps in LOCAL_STEPS}
"""SparseLoCo as published, likewise with the optimizer as it is."""
SPARSE_LOCAL: dict[str, Outer] = {
    f"{name}{UPDATES}-{steps}": Outer(local_steps=steps) for name in RECIPES if name != DENSE for steps in LOCAL_STEPS
}
"""Recipes that exchange the updates of so many local steps."""
OUTERS = LOCAL | PUBLISHED_LOCAL | SPARSE_LOCAL

EXCHANGES: Registry[str] = Registry(
    "recipe",
    {
        **{name: name for name in RECIPES},
        **{f"{name}{ending}": name for name in RECIPES for ending in VARIANTS if name != DENSE},
        **{f"{DENSE}{ending}": DENSE for ending in DENSE_VARIANTS},
        **{name: DENSE for name in PEERS if name != "ddp"},  # which is dense
        **dict.fromkeys(LOCAL, DENSE),
        **dict.fromkeys(PUBLISHED_LOCAL, "sparseloco"),
        **{name: name.partition(UPDATES)[0] for name in SPARSE_LOCAL},
    },
)
"""Every recipe; every one without error feedback, to show what feedback is for; with DGC's momentum correction; without
the optimizer's momentum, at the rate that momentum comes to; with an Adam that counts deliveries; with updates
exchanged instead of gradients, after one or several local steps; to the recipe's own name. And the peers, which have
none of it.
"""
DENSITY_MARK, RATE_MARK = ":", "@"


@dataclass(frozen=True)
class Exchange:
    """What is chosen of it. `dense` is DDP with no hook at all: the honest baseline."""

    recipe: str
    density: float | None = None  # share of entries that is sent; None is the preset's, with its warm-up
    values: str = OWN  # how values are written; fewer bits send less; `own` is replaced by the recipe's code
    dense_steps: int = 0  # steps at the start that send everything; more is safer, and slower
    group_mb: float | None = 25.0  # the most that is exchanged as one; less overlaps sooner, None is the whole model
    rate: float | None = None  # base learning rate of its own; None is the run's
    own_density: bool = False  # whether the density is its own, and part of its name, instead of the run's

    def __post_init__(self) -> None:
        base = EXCHANGES[self.recipe]
        made = recipe(base, values=self.values)
        if self.values == OWN:
            object.__setattr__(self, "values", made.reducer.codec.values)
        if self.density is not None and not 0 < self.density <= 1:
            raise InputError(f"density must be in (0, 1], got {self.density}")
        if self.dense_steps < 0:
            raise InputError(f"dense steps must not be negative, got {self.dense_steps}")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise InputError(f"rate of {self.recipe} must be positive, got {self.rate}")

    @property
    def of_updates(self) -> bool:
        """Whether every rank steps on its own gradient and the ranks exchange what the optimizer did."""
        return self.adapts or self.outer is not None

    @property
    def outer(self) -> Outer | None:
        """How a shared model follows the delivered mean; None is the default."""
        return OUTERS.get(self.recipe)

    @property
    def adapts(self) -> bool:
        """Whether the optimizer is turned into its form for own gradients; baselines have it as it is."""
        return UPDATES in self.recipe

    @property
    def peer(self) -> Peer | None:
        """The hook of torch's that does it, or DDP's own way; None if a recipe does."""
        if self.recipe in (DENSE, *(DENSE + ending for ending in DENSE_VARIANTS)):
            return PEERS["ddp"]
        if self.recipe in PEERS:
            return PEERS[self.recipe]
        return None

    @property
    def name(self) -> str:
        """As it is asked for: of the recipe, with its density and its rate if it has its own."""
        density = f"{DENSITY_MARK}{self.density:g}" if self.own_density else ""
        rate = "" if self.rate is None else f"{RATE_MARK}{self.rate:g}"
        return f"{self.recipe}{density}{rate}"

    @property
    def is_baseline(self) -> bool:
        """Whether it is one of the ways that this library competes with."""
        return self.peer is not None or (self.of_updates and not self.adapts)

    @property
    def local_steps(self) -> int:
        """Steps from exchange to exchange."""
        return self.peer.local_steps if self.peer else (self.outer or Outer()).local_steps

    @property
    def label(self) -> str:
        """For tables and plots."""
        own = recipe(EXCHANGES[self.recipe]).reducer.codec.values
        return self.name if self.values == own else f"{self.name} {self.values}"

    def num_dense_steps(self, total_steps: int) -> int:
        """Steps of a run that send everything before this begins."""
        return self.dense_steps if self.peer is None else self.peer.num_dense_steps(total_steps)

    def build(self, preset: Preset) -> Recipe:
        """The recipe, with the preset's periods, and with the optimizer's momentum where it takes its place."""
        base = EXCHANGES[self.recipe]
        made = replace(preset.sieve, recipe=base).build()
        coded = recipe(base, values=self.values)
        made = replace(made, reducer=replace(made.reducer, codec=coded.reducer.codec))
        if UPDATES in self.recipe:
            return replace(made, feedback=Residual())
        if isinstance(made.feedback, MomentumResidual) or self.recipe.endswith(CORRECTED):
            momentum = 0.0 if self.recipe.endswith(PLAIN) else _momentum(preset.optimizer)
            made = replace(made, feedback=MomentumResidual(momentum))
        return replace(made, feedback=NoFeedback()) if self.recipe.endswith(WITHOUT) else made

    def optimizer(self, preset: Preset) -> OptimizerSetting:
        """The preset's; without momentum where the recipe has it, or is to do without; at a rate of its own, if any."""
        setting = preset.optimizer
        if self.recipe.endswith(PLAIN):
            setting = setting.without_momentum()
        elif self.recipe.endswith(LAZY):
            setting = setting.lazy()
        elif isinstance(setting, Sgd) and self._has_momentum(preset):
            setting = replace(setting, momentum=0.0, nesterov=False)
        return setting if self.rate is None else setting.at(self.rate)

    def _has_momentum(self, preset: Preset) -> bool:
        return self.peer is None and isinstance(self.build(preset).feedback, MomentumResidual)

    def schedule(self, preset: Preset, steps_per_epoch: int) -> Schedule:
        """A density that was asked for holds throughout; the preset's comes after its warm-up."""
        if self.recipe in LOCAL:
            return Constant(1.0)
        if self.density is not None:
            return Constant(self.density, self.dense_steps)
        if self.recipe in PUBLISHED_LOCAL:
            return Constant(SPARSELOCO_DENSITY, self.dense_steps)
        if EXCHANGES[self.recipe] == ONEBIT:
            return Constant(DEFAULT_UPDATE_DENSITY, self.dense_steps)
        densities = (*preset.sieve.warmup, preset.sieve.density)
        if len(densities) == 1:
            return Constant(densities[0], self.dense_steps)
        return Steps(densities, steps_per_epoch, self.dense_steps)


def mixtures(base: Exchange, recipes: Sequence[str], codes: Sequence[str]) -> list[Exchange]:
    """Every recipe with every code of values, each once; peers have no codes.

    `NAME:DENSITY` has a density of its own, `NAME@RATE` a rate, `NAME:DENSITY@RATE` both.
    """
    plain = [_named(base, name) for name in recipes]
    return list(dict.fromkeys(each if each.peer else replace(each, values=code) for each in plain for code in codes))


def _named(base: Exchange, text: str) -> Exchange:
    rest, _, rate = text.partition(RATE_MARK)
    name, _, density = rest.partition(DENSITY_MARK)
    named = replace(base, recipe=name)
    if RATE_MARK in text:
        named = replace(named, rate=_number(rate, f"after {RATE_MARK} comes a learning rate, as in {name}@0.1", text))
    if DENSITY_MARK in rest:
        own = _number(density, f"after {DENSITY_MARK} comes a density, as in {name}:0.01", text)
        if named.peer is not None or named.recipe in LOCAL:
            raise InputError(f"{name} sends everything and has no density, got {text!r}")
        named = replace(named, density=own, own_density=True)
    return named


def _number(written: str, wanted: str, text: str) -> float:
    try:
        return float(written)
    except ValueError:
        raise InputError(f"{wanted}, got {text!r}") from None


def _momentum(setting: OptimizerSetting) -> float:
    """Adam has a momentum of its own kind, which stays with it: there the residual is a plain one."""
    return setting.momentum if isinstance(setting, Sgd) else 0.0
