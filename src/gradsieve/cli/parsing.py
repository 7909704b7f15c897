"""Values on the command line: counts, densities, and several of them after one option."""

from __future__ import annotations

from typing import Any

import click

from gradsieve.errors import InputError

SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}


def count(context: click.Context, option: click.Parameter, value: Any) -> int | None:
    """A whole number of at least one, also as `14.7M` or `1e6`; or nothing."""
    return None if value is None else _count(option, value)


def counts(context: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> tuple[int, ...]:
    """Several of them."""
    return tuple(_count(option, value) for value in values)


def density(context: click.Context, option: click.Parameter, value: Any) -> float | None:
    """The share of entries that is sent, or nothing."""
    return None if value is None else _density(value)


def densities(context: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> tuple[float, ...]:
    """Several of them."""
    return tuple(map(_density, values))


class ManyValues(click.Command):
    """Options that may be given repeatedly also take several values at once: `--threads 1 2`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spread them, then parse as ever."""
        spread = {name for p in self.params if isinstance(p, click.Option) and p.multiple for name in p.opts}
        return super().parse_args(ctx, _repeated(args, spread))


def _repeated(args: list[str], options: set[str]) -> list[str]:
    """`--a 1 2` as `--a 1 --a 2`, for these options."""
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


def _count(option: click.Parameter, value: Any) -> int:
    name = _name(option)
    try:
        number = _number(str(value))
    except (ValueError, OverflowError):
        raise InputError(f"{name} must be a whole number, got {value!r}") from None
    if number < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    return number


def _number(text: str) -> int:
    scale = SUFFIXES.get(text[-1:].upper(), 1)
    number = float(text[:-1] if scale > 1 else text) * scale
    rounded = round(number)  # an infinity raises here
    if abs(number - rounded) > 1e-6:
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


def positive(context: click.Context, option: click.Parameter, value: Any) -> float | None:
    """A number above zero, or nothing."""
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
    """Megabytes, or `none`."""
    return None if value is None or str(value).lower() == "none" else positive(context, option, value)


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Several, with commas in between, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not found:
        raise InputError(f"{_name(option)} must name at least one, got {value!r}")
    return found


def _name(option: click.Parameter) -> str:
    return str(option.opts[0]).removeprefix("--")
