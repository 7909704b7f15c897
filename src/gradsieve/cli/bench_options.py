"""Options that several commands of `gradsieve bench` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from gradsieve.cli.parsing import count_option, counts, densities
from gradsieve.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

DENSITIES = (0.01,)
DENSITY_HELP = "Fraction of the entries to send."
RANKS_HELP = "Number of ranks."
VALUES_HELP = "Value code, which encodes the values that are sent; own: the recipe's own code."
LIMITED_LINKS = (
    "Run each rank in a host of its own on links of this rate: 100mbit, unlimited, 1gbit+5ms, … (Linux).  "
    "[default: loopback]"
)


def several(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option that takes several values and shows its default."""
    return click.option(*names, multiple=True, type=str, show_default=True, **settings)


def numel_option(default: Sequence[int]) -> Callable[[F], F]:
    text = "Length of the gradient in entries, such as 14.7M; several lengths are measured one after the other."
    return several("--numel", "numels", callback=counts, default=default, metavar="N ...", help=text)


def densities_option() -> Callable[[F], F]:
    return several("--density", "densities", callback=densities, default=DENSITIES, metavar="D ...", help=DENSITY_HELP)


def ranks_option(default: Sequence[int]) -> Callable[[F], F]:
    names = "--ranks", "--hosts", "ranks"
    return several(*names, callback=counts, default=default, metavar="P ...", help=RANKS_HELP)


def repeats_option(default: int) -> Callable[[F], F]:
    return count_option("--repeats", default=default, metavar="R", help="Timed steps per row of the table.")


def json_option() -> Callable[[F], F]:
    text = "Print one JSON object with the environment and the results, instead of a table."
    return click.option("--json", "as_json", is_flag=True, help=text)


def network_option(text: str = LIMITED_LINKS) -> Callable[[F], F]:
    return click.option("--network", "networks", multiple=True, metavar="RATE ...", help=text)


def values_option() -> Callable[[F], F]:
    return several("--values", default=("own",), metavar="CODE ...", help=VALUES_HELP)


def threads_option() -> Callable[[F], F]:
    return several("--threads", callback=counts, default=(1, 2), metavar="T ...", help="Number of torch threads.")


def baseline_options(command: F) -> F:
    """`--peer` and `--no-peers`. Their fields are `baselines` and `no_baselines`."""
    text = "Baselines to measure: ddp and torch's DDP hooks.  [default: the common ones with --network, else none]"
    command = click.option("--no-peers", "no_baselines", is_flag=True, help="Measure no baselines.")(command)
    return click.option("--peer", "baselines", multiple=True, metavar="NAME ...", help=text)(command)


def chosen_baselines(baselines: Sequence[str], no_baselines: bool, networks: Sequence[str]) -> list[str]:
    """The named baselines; if none is named, the common ones on networks, unless `no_baselines`."""
    from gradsieve.lab.baselines import BASELINES

    if baselines and no_baselines:
        raise InputError("--peer and --no-peers exclude each other")
    for name in baselines:
        BASELINES[name]  # raises for an unknown name
    usual = [name for name, baseline in BASELINES.items() if baseline.usual]
    return list(baselines) or (usual if networks and not no_baselines else [])
