"""A choice: a recipe with its variations, or a baseline. It decides how a run exchanges gradients or updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradsieve.engine.schedules import Constant, Schedule, Steps
from gradsieve.errors import InputError
from gradsieve.feedback import MomentumResidual, NoFeedback, Residual
from gradsieve.lab.baselines import BASELINES, Baseline
from gradsieve.lab.train.variants import (
    BASE_RECIPES,
    CORRECTED,
    DENSE,
    DENSE_LOCAL,
    DENSE_NAMES,
    LAZY,
    ONEBIT,
    OUTERS,
    SPARSELOCO_DENSITY,
    SPARSELOCO_LOCAL,
    UPDATES,
    WITHOUT_FEEDBACK,
    WITHOUT_MOMENTUM,
)
from gradsieve.lab.workloads.optimizer import OptimizerSetting, Sgd
from gradsieve.lab.workloads.workload import Preset
from gradsieve.recipes import OWN, Recipe, recipe
from gradsieve.updates import Outer
from gradsieve.updates.defaults import DEFAULT_UPDATE_DENSITY, sign_code

__all__ = ["DENSE", "Choice", "parse_choices"]

DENSITY_MARK, RATE_MARK = ":", "@"


@dataclass(frozen=True)
class Choice:
    """How a run exchanges. `dense` is DDP without any hook."""

    recipe: str  # a name in `BASE_RECIPES`
    density: float | None = None  # share of entries that is sent; None is the preset's, with its warm-up
    values: str = OWN  # value code; fewer bits send less; `own` is the recipe's code, or the optimizer's (`coded`)
    dense_steps: int = 0  # steps at the start that send everything; more is safer, and slower
    group_mb: float | None = 25.0  # largest group; smaller ones overlap earlier, None is the whole model
    rate: float | None = None  # its own base learning rate; None is the run's
    own_density: bool = False  # whether the density is the choice's own, and part of its name, or the run's

    def __post_init__(self) -> None:
        recipe(BASE_RECIPES[self.recipe], values=self.values)  # an error if the recipe does not have this code
        if self.density is not None and not 0 < self.density <= 1:
            raise InputError(f"density must be in (0, 1], got {self.density}")
        if self.dense_steps < 0:
            raise InputError(f"dense steps must not be negative, got {self.dense_steps}")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise InputError(f"the learning rate of {self.recipe} must be positive, got {self.rate}")

    @property
    def of_updates(self) -> bool:
        """Whether each rank's optimizer steps on its own gradient and the ranks exchange the updates."""
        return self.adapts or self.outer is not None

    @property
    def outer(self) -> Outer | None:
        """How the shared model follows the delivered mean; None is the default."""
        return OUTERS.get(self.recipe)

    @property
    def adapts(self) -> bool:
        """Whether the optimizer is replaced by its form for a rank's own gradient. Baselines keep it unchanged."""
        return UPDATES in self.recipe

    @property
    def ddp_baseline(self) -> Baseline | None:
        """The DDP baseline that exchanges, with or without a hook; None if one of this library's recipes does."""
        if self.recipe in DENSE_NAMES:
            return BASELINES["ddp"]
        if self.recipe in BASELINES:
            return BASELINES[self.recipe]
        return None

    @property
    def is_baseline(self) -> bool:
        """Whether this is a competing method: a DDP baseline, or a published method with local steps."""
        return self.ddp_baseline is not None or (self.of_updates and not self.adapts)

    @property
    def name(self) -> str:
        """As on the command line: the recipe, with density and learning rate if they are its own."""
        density = f"{DENSITY_MARK}{self.density:g}" if self.own_density else ""
        rate = "" if self.rate is None else f"{RATE_MARK}{self.rate:g}"
        return f"{self.recipe}{density}{rate}"

    @property
    def local_steps(self) -> int:
        """Steps between two exchanges."""
        return self.ddp_baseline.local_steps if self.ddp_baseline else (self.outer or Outer()).local_steps

    @property
    def label(self) -> str:
        """For tables and plots: the name, followed by the value code unless it is the recipe's own."""
        own = recipe(BASE_RECIPES[self.recipe]).reducer.codec.values
        return self.name if self.values in (OWN, own) else f"{self.name} {self.values}"

    def coded(self, preset: Preset) -> Choice:
        """The choice with its value code: the given one, or the one that the library would take for the optimizer."""
        if self.values != OWN:
            return self
        base = BASE_RECIPES[self.recipe]
        if base == ONEBIT and self.of_updates:
            return replace(self, values=sign_code(self.optimizer(preset).build(nn.Linear(1, 1))))
        return replace(self, values=recipe(base).reducer.codec.values)

    def num_dense_steps(self, total_steps: int) -> int:
        """Steps at the start of a run that send everything."""
        return self.dense_steps if self.ddp_baseline is None else self.ddp_baseline.num_dense_steps(total_steps)

    def build(self, preset: Preset) -> Recipe:
        """The recipe with the preset's periods. Momentum correction takes over the optimizer's momentum."""
        base = BASE_RECIPES[self.recipe]
        made = replace(preset.sieve, recipe=base).build()
        coded = recipe(base, values=self.values)
        made = replace(made, reducer=replace(made.reducer, codec=coded.reducer.codec))
        if UPDATES in self.recipe:
            return replace(made, feedback=Residual())
        if isinstance(made.feedback, MomentumResidual) or self.recipe.endswith(CORRECTED):
            momentum = 0.0 if self.recipe.endswith(WITHOUT_MOMENTUM) else _momentum(preset.optimizer)
            made = replace(made, feedback=MomentumResidual(momentum))
        return replace(made, feedback=NoFeedback()) if self.recipe.endswith(WITHOUT_FEEDBACK) else made

    def optimizer(self, preset: Preset) -> OptimizerSetting:
        """The preset's optimizer, changed as the name's ending says, at the choice's own learning rate if it has one.

        SGD has no momentum where the recipe corrects it.
        """
        setting = preset.optimizer
        if self.recipe.endswith(WITHOUT_MOMENTUM):
            setting = setting.without_momentum()
        elif self.recipe.endswith(LAZY):
            setting = setting.lazy()
        elif isinstance(setting, Sgd) and self._corrects_momentum(preset):
            setting = replace(setting, momentum=0.0, nesterov=False)
        return setting if self.rate is None else setting.at(self.rate)

    def _corrects_momentum(self, preset: Preset) -> bool:
        return self.ddp_baseline is None and isinstance(self.build(preset).feedback, MomentumResidual)

    def schedule(self, preset: Preset, steps_per_epoch: int) -> Schedule:
        """Densities per step. An explicit density is constant; the preset's follows its warm-up."""
        if self.recipe in DENSE_LOCAL:
            return Constant(1.0)
        if self.density is not None:
            return Constant(self.density, self.dense_steps)
        if self.recipe in SPARSELOCO_LOCAL:
            return Constant(SPARSELOCO_DENSITY, self.dense_steps)
        if BASE_RECIPES[self.recipe] == ONEBIT:
            return Constant(DEFAULT_UPDATE_DENSITY, self.dense_steps)
        densities = (*preset.sieve.warmup, preset.sieve.density)
        if len(densities) == 1:
            return Constant(densities[0], self.dense_steps)
        return Steps(densities, steps_per_epoch, self.dense_steps)


def parse_choices(base: Choice, names: Sequence[str], codes: Sequence[str]) -> list[Choice]:
    """Every name with every value code, each once. DDP baselines have no codes.

    `NAME:DENSITY` has its own density, `NAME@RATE` its own learning rate, `NAME:DENSITY@RATE` both. All other settings
    are those of `base`.
    """
    parsed = [_parse(base, name) for name in names]
    return list(
        dict.fromkeys(replace(each, values=OWN if each.ddp_baseline else code) for each in parsed for code in codes)
    )


def _parse(base: Choice, text: str) -> Choice:
    rest, _, rate = text.partition(RATE_MARK)
    name, _, density = rest.partition(DENSITY_MARK)
    parsed = replace(base, recipe=name)
    if RATE_MARK in text:
        wanted = f"{RATE_MARK} must be followed by a learning rate, as in {name}@0.1"
        parsed = replace(parsed, rate=_number(rate, wanted, text))
    if DENSITY_MARK in rest:
        own = _number(density, f"{DENSITY_MARK} must be followed by a density, as in {name}:0.01", text)
        if parsed.ddp_baseline is not None or parsed.recipe in DENSE_LOCAL:
            raise InputError(f"{name} sends everything and has no density, got {text!r}")
        parsed = replace(parsed, density=own, own_density=True)
    return parsed


def _number(written: str, wanted: str, text: str) -> float:
    try:
        return float(written)
    except ValueError:
        raise InputError(f"{wanted}, got {text!r}") from None


def _momentum(setting: OptimizerSetting) -> float:
    """SGD's momentum. Adam keeps its first moments, so its residual has no momentum."""
    return setting.momentum if isinstance(setting, Sgd) else 0.0
