"""Parsing the command line: counts, densities, several values per option, and one dataclass per command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gradsieve.errors import InputError

SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}

F = TypeVar("F", bound=Callable[..., Any])
OptionsT = TypeVar("OptionsT")
ReturnT = TypeVar("ReturnT")


def parsed_into(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], ReturnT]], Callable[..., ReturnT]]:
    """Decorator, below all `click.option`s: the command receives one `options` object instead of keyword arguments.

    Every parameter of the command must have a field of the same name.
    """

    def decorate(command: Callable[[OptionsT], ReturnT]) -> Callable[..., ReturnT]:
        @functools.wraps(command)
        def parsed(**values: Any) -> ReturnT:
            return command(options(**values))

        return parsed

    return decorate


def given_options() -> dict[str, str]:
    """The options and arguments of the running command that the user gave: field name to name on the command line."""
    context = click.get_current_context()
    defaults = (None, click.core.ParameterSource.DEFAULT)
    return {
        name: _name(parameter)
        for parameter in context.command.params
        if (name := parameter.name) is not None and context.get_parameter_source(name) not in defaults
    }


class ManyValues(click.Command):
    """A command whose repeatable options also take several values at once: `--threads 1 2`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread = {name for p in self.params if isinstance(p, click.Option) and p.multiple for name in p.opts}
        return super().parse_args(ctx, _repeated(args, spread))


def _repeated(args: list[str], options: set[str]) -> list[str]:
    """Rewrite `--a 1 2` as `--a 1 --a 2`, for these options."""
    repeated: list[str] = []
    current, has_value = "", False
    for argument in args:
        if argument.startswith("--"):
            current, has_value = argument, False
        elif has_value and current in options:
            repeated.append(current)
        else:
            has_value = True
        repeated.append(argument)
    return repeated


# Options of one value. An option that is not given and has no default is None.


def count_option(*names: str, default: int | None = None, metavar: str = "N", help: str) -> Callable[[F], F]:
    """A whole number of at least 1, also written as `14.7M` or `1e6`."""
    shown = default is not None
    return click.option(
        *names, type=str, callback=count, default=default, show_default=shown, metavar=metavar, help=help
    )


def density_option(*, default: float | None = None, help: str) -> Callable[[F], F]:
    """`--density`, a number in (0, 1]."""
    shown = default is not None
    return click.option(
        "--density", type=str, callback=density, default=default, show_default=shown, metavar="D", help=help
    )


def positive_option(name: str, *, metavar: str = "N", help: str) -> Callable[[F], F]:
    """A finite number above zero."""
    return click.option(name, type=str, callback=positive, metavar=metavar, help=help)


def seed_option(name: str, *, help: str) -> Callable[[F], F]:
    return click.option(name, type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help=help)


def folder_option(name: str, *, help: str) -> Callable[[F], F]:
    return click.option(name, type=click.Path(path_type=Path), metavar="FOLDER", help=help)


# Callbacks of click.option. Those for a single value return None if the option was not given.


def count(context: click.Context, option: click.Parameter, value: Any) -> int | None:
    return None if value is None else _count(option, value)


def counts(context: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(_count(option, value) for value in values)


def density(context: click.Context, option: click.Parameter, value: Any) -> float | None:
    return None if value is None else _density(value)


def densities(context: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(map(_density, values))


def positive(context: click.Context, option: click.Parameter, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise InputError(f"{_name(option)} must be a positive number, got {value}")
    return number


def group_size(context: click.Context, option: click.Parameter, value: Any) -> float | None:
    """Megabytes, or None for `none`."""
    return None if value is None or str(value).lower() == "none" else positive(context, option, value)


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Names separated by commas, without duplicates."""
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not found:
        raise InputError(f"{_name(option)} must name at least one, got {value!r}")
    return found


def _count(option: click.Parameter, value: Any) -> int:
    name = _name(option)
    try:
        number = _whole_number(str(value))
    except (ValueError, OverflowError):
        raise InputError(f"{name} must be a whole number, got {value!r}") from None
    if number < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    return number


def _whole_number(text: str) -> int:
    scale = SUFFIXES.get(text[-1:].upper(), 1)
    number = float(text[:-1] if scale > 1 else text) * scale
    rounded = round(number)  # raises OverflowError for infinity
    if abs(number - rounded) > 1e-6:  # 14.7M is not exactly whole in binary
        raise ValueError(text)
    return rounded


def _density(value: Any) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number <= 1:
        raise InputError(f"density must be in (0, 1], got {value}")
    return number


def _name(option: click.Parameter) -> str:
    return str(option.opts[0]).removeprefix("--")
