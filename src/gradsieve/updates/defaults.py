"""The default recipes and densities, for gradients and for updates."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from gradsieve.engine.rules import Rules
from gradsieve.engine.schedules import Schedule, as_schedule
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.recipes import recipe as named_recipe
from gradsieve.selectors.window import Window

AUTO = "auto"
"""The default: a sparse recipe or dense, whichever measured step times favour. The sparse ones are those below."""
DEFAULT_RECIPE = "oktopk"
DEFAULT_UPDATE_RECIPE = "onebit"
DEFAULT_UPDATE_DENSITY = 0.5  # 62 times fewer bytes than dense; with less the model learns less (docs/optimizers.md)
NONE_WHOLE = Rules(min_numel=0, min_dimensions=0)
"""Rules by which no parameter is sent whole."""
EVEN = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
"""Optimizers whose updates are about as large as the learning rate in every layer. `AdamW` is an `Adam`."""


def decides(recipe: str | Recipe | None) -> bool:
    """Whether the exchange is decided from measured times."""
    return recipe is None or recipe == AUTO


def chosen_exchange(
    recipe: str | Recipe | None, density: float | Schedule | None, optimizer: Optimizer | None
) -> tuple[Recipe, Schedule]:
    """Return recipe and schedule: as given, or the defaults for gradients (no optimizer) or updates."""
    name = (None if decides(recipe) else recipe) or (DEFAULT_RECIPE if optimizer is None else DEFAULT_UPDATE_RECIPE)
    if density is None:
        if optimizer is None or name != DEFAULT_UPDATE_RECIPE:
            raise InputError(
                f"density must be given with recipe {name if isinstance(name, str) else type(name).__name__}, as in "
                "attach(model, density=0.01); attach(model, optimizer=optimizer) exchanges updates and has a default"
            )
        density = DEFAULT_UPDATE_DENSITY
    if isinstance(name, Recipe):
        return name, as_schedule(density)
    if optimizer is not None and name == DEFAULT_UPDATE_RECIPE:
        return named_recipe(name, values=sign_code(optimizer)), as_schedule(density)
    return named_recipe(name), as_schedule(density)


def default_rules(recipe: Recipe, optimizer: Optimizer | None) -> Rules:
    """Which parameters are exchanged whole: biases, norms and small tensors, all in one all_reduce.

    None are where a moving window sends Adam's updates, as `onebit` does. Small parameters' updates are as large as
    those of matrices, so one bit serves them as well, and the all_reduce is saved.
    """
    if isinstance(optimizer, EVEN) and isinstance(recipe.selector, Window):
        return NONE_WHOLE
    return Rules()


def sign_code(optimizer: Optimizer) -> str:
    """Return the one-bit value code that suits an optimizer.

    `bit` has one step size per message, for updates that are equally large in all layers. `sign` has one per 1,024
    entries, for all others, such as SGD's.
    """
    return "bit" if isinstance(optimizer, EVEN) else "sign"
