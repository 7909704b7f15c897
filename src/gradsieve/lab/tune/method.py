"""A method: a recipe with density and value code, or a baseline, and the line that a user pastes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.engine.rules import Rules
from gradsieve.errors import InputError
from gradsieve.lab.baselines import BASELINES
from gradsieve.recipes import OWN, RECIPES, Recipe, recipe
from gradsieve.updates.defaults import DEFAULT_UPDATE_DENSITY, DEFAULT_UPDATE_RECIPE, NONE_WHOLE

DENSE = "ddp"
TORCH_METHODS = (DENSE, "bf16", "powersgd-1", "powersgd-4")
GRADIENT_RECIPES = tuple(name for name in RECIPES if name not in ("dense", DEFAULT_UPDATE_RECIPE))
GRADIENT_DENSITIES = (0.001, 0.01, 0.02, 0.05)
UPDATE_DENSITIES = (0.25, 0.5, 1.0)
VALUE_CODES = ("exact", "bf16", "int8")
PASTED = {
    "bf16": "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
    "powersgd-1": "model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook)",
    "powersgd-4": "model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)",
}


@dataclass(frozen=True)
class Method:
    """How ranks exchange."""

    recipe: str  # a recipe, or the name of a baseline
    density: float = 1.0  # share of entries that is sent per step
    values: str = ""  # value code; empty for a baseline

    @property
    def is_baseline(self) -> bool:
        return not self.values

    @property
    def of_updates(self) -> bool:
        """Whether the optimizer's updates are exchanged, before the forward pass."""
        return self.recipe == DEFAULT_UPDATE_RECIPE

    @property
    def can_be_checked(self) -> bool:
        """Whether it may be run at full size. PowerSGD's first two steps are dense, minutes each on a slow link."""
        return not self.recipe.startswith("powersgd")

    @property
    def is_default(self) -> bool:
        """Whether this is what `attach` does if only an optimizer is given."""
        return self.of_updates and self.density == DEFAULT_UPDATE_DENSITY

    @property
    def has_own_code(self) -> bool:
        return self.values == recipe(self.recipe).reducer.codec.values

    @property
    def name(self) -> str:
        """For tables, such as `oktopk 1% bf16`."""
        if self.is_baseline:
            return "dense" if self.recipe == DENSE else self.recipe
        return f"{self.recipe} {100 * self.density:g}%" + ("" if self.has_own_code else f" {self.values}")

    @property
    def line(self) -> str:
        """The line to paste after the model has been wrapped."""
        if self.is_baseline:
            return PASTED.get(self.recipe, "model = DistributedDataParallel(model)")
        if self.of_updates:
            density = "" if self.is_default else f", density={self.density:g}"
            return f"sieve = gradsieve.attach(model, optimizer=optimizer{density})"
        chosen = f'"{self.recipe}"'
        if not self.has_own_code:
            chosen = f'gradsieve.recipe("{self.recipe}", values="{self.values}")'
        return f"sieve = gradsieve.attach(model, {chosen}, density={self.density:g})"

    @property
    def rules(self) -> Rules:
        """Which parameters are sent whole."""
        return rules_of(self.of_updates)

    def build(self) -> Recipe:
        return recipe(self.recipe, values=self.values)


def rules_of(of_updates: bool) -> Rules:
    """The rules that `attach` takes for gradients, or for Adam's updates."""
    return NONE_WHOLE if of_updates else Rules()


def candidates(recipes: Sequence[str], densities: Sequence[float], codes: Sequence[str]) -> list[Method]:
    """All methods of this library that are compared. No names mean all."""
    for name in recipes:
        RECIPES[name]  # raises for an unknown name
    chosen = [name for name in recipes if name != "dense"] or [*GRADIENT_RECIPES, DEFAULT_UPDATE_RECIPE]
    found: list[Method] = []
    for name in chosen:
        own = recipe(name).reducer.codec.values
        if name == DEFAULT_UPDATE_RECIPE:
            found += [Method(name, density, own) for density in UPDATE_DENSITIES]
            continue
        for code in dict.fromkeys(_codes(own, codes)):
            recipe(name, values=code)  # raises for an unknown code
            found += [Method(name, density, code) for density in densities or GRADIENT_DENSITIES]
    if not found:
        raise InputError("there is nothing to compare with dense: name another recipe")
    return found


def _codes(own: str, codes: Sequence[str]) -> list[str]:
    """Value codes to compare: a recipe whose own code is not `exact` keeps it."""
    if own != "exact":
        return [own]
    return [own if code == OWN else code for code in codes or VALUE_CODES]


def baselines() -> list[Method]:
    return [Method(name) for name in TORCH_METHODS if name in BASELINES]
