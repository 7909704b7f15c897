"""The content of the registries as plain data: names, descriptions, and settings with their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from gradsieve.recipes import RECIPES, NamedRecipe
from gradsieve.reducers import REDUCERS
from gradsieve.selectors import SELECTORS

Entry = dict[str, Any]
"""`name`, `description`, `settings` (name to default), and for reducers `conserving`."""


def catalog() -> dict[str, list[Entry]]:
    return {
        "recipes": [_recipe(name, row) for name, row in RECIPES.items()],
        "selectors": [_entry(name, made) for name, made in SELECTORS.items()],
        "reducers": [{**_entry(name, made), "conserving": made.conserving} for name, made in REDUCERS.items()],
    }


def _recipe(name: str, row: NamedRecipe) -> Entry:
    parts = {field.name: _plain(getattr(row.made, field.name)) for field in dataclasses.fields(row.made)}
    return {"name": name, "description": row.description, "settings": parts}


def _entry(name: str, made: type[Any]) -> Entry:
    lines = (inspect.getdoc(made) or "").splitlines()
    return {"name": name, "description": lines[0] if lines else "", "settings": _settings(made)}


def _settings(made: type[Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(made):
        return {}
    return {field.name: _plain(field.default) for field in dataclasses.fields(made) if field.init}


def _plain(default: Any) -> Any:
    """A default as a JSON value; a selector or reducer is given by its name."""
    if default is dataclasses.MISSING or default is None or isinstance(default, bool | int | float | str):
        return None if default is dataclasses.MISSING else default
    if isinstance(default, tuple):
        return [_plain(item) for item in default]
    registries: tuple[Mapping[str, type[Any]], ...] = (SELECTORS, REDUCERS)
    names = (name for registry in registries for name, made in registry.items() if default == made())
    return next(names, None) or repr(default)
