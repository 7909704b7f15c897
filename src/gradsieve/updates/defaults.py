"""What is exchanged if a user does not say: recipe and density, for gradients and for updates."""

from __future__ import annotations

from gradsieve.engine.schedules import Schedule, as_schedule
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe
from gradsieve.recipes import recipe as named_recipe

DEFAULT_RECIPE = "oktopk"
DEFAULT_UPDATE_RECIPE = "onebit"
DEFAULT_UPDATE_DENSITY = 0.5  # 64 times fewer bytes than dense; lower loses learning (docs/optimizers.md)


def chosen_exchange(
    recipe: str | Recipe | None, density: float | Schedule | None, *, updates: bool
) -> tuple[Recipe, Schedule]:
    """Recipe and schedule, with the defaults of what is exchanged."""
    name = recipe or (DEFAULT_UPDATE_RECIPE if updates else DEFAULT_RECIPE)
    if density is None:
        if not updates or name != DEFAULT_UPDATE_RECIPE:
            raise InputError(
                f"density must be given with recipe {name if isinstance(name, str) else type(name).__name__}, as in "
                "attach(model, density=0.01); attach(model, optimizer=optimizer) exchanges updates and has a default"
            )
        density = DEFAULT_UPDATE_DENSITY
    return name if isinstance(name, Recipe) else named_recipe(name), as_schedule(density)
