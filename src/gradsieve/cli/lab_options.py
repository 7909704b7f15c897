"""Options that several commands of `gradsieve lab` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from gradsieve.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class LinksOptions:
    """Fields of `links_options`."""

    rate: str
    host_rates: Mapping[int, str]  # host to rate, for hosts whose rate differs
    latency: str | None


def links_options(command: F) -> F:
    """Rate and latency of the links."""
    rate = click.option(
        "--rate",
        default="1gbit",
        show_default=True,
        metavar="RATE",
        help="Rate of every link in both directions: 100mbit, 10gbit, unlimited, …",
    )
    others = click.option(
        "--slow-host",
        "--host-rate",
        "host_rates",
        multiple=True,
        callback=_host_rates,
        metavar="HOST=RATE",
        help="A host whose link has another rate, such as 3=100mbit; repeatable.",
    )
    latency = click.option("--latency", metavar="TIME", help="One-way latency to add between two hosts, such as 5ms.")
    return rate(others(latency(command)))


def name_option(command: F) -> F:
    text = "Name of the laboratory, if there are several."
    return click.option("--name", default="lab", show_default=True, metavar="NAME", help=text)(command)


def _host_rates(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[int, str]:
    rates = {}
    for value in values:
        host, equals, rate = value.partition("=")
        if not equals or not host.isdecimal():
            raise InputError(f"host-rate must be HOST=RATE, such as 3=100mbit, got {value!r}")
        rates[int(host)] = rate
    return rates
