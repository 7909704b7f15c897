"""What the commands of `gradsieve bench` share: options, and the one form of their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradsieve.cli.console import stdout
from gradsieve.cli.values import count, counts, densities
from gradsieve.errors import InputError

if TYPE_CHECKING:
    from gradsieve.lab.bench.report import Column, Report

F = TypeVar("F", bound=Callable[..., Any])

DENSITIES = (0.01,)


def numel_option(default: Sequence[int]) -> Callable[[F], F]:
    """How long the gradients are."""
    text = "Length of the gradient; several values are measured one after the other; 14.7M is fine."
    return several("--numel", "numels", callback=counts, default=default, metavar="N ...", help=text)


def density_option() -> Callable[[F], F]:
    """Which share of the entries is sent."""
    text = "Share of the entries that is sent."
    return several("--density", "densities", callback=densities, default=DENSITIES, metavar="D ...", help=text)


def ranks_option(default: Sequence[int]) -> Callable[[F], F]:
    """How many workers."""
    names = "--ranks", "--hosts", "ranks"
    return several(*names, callback=counts, default=default, metavar="P ...", help="Workers.")


def repeats_option(default: int) -> Callable[[F], F]:
    """How many steps the median is taken over."""
    return click.option(
        "--repeats",
        type=str,
        callback=count,
        default=default,
        show_default=True,
        metavar="R",
        help="Timed steps of each.",
    )


def json_option() -> Callable[[F], F]:
    """The same form for all."""
    text = "Print one JSON object: environment and results."
    return click.option("--json", "as_json", is_flag=True, help=text)


def network_option(text: str) -> Callable[[F], F]:
    """Where the ranks are."""
    return click.option("--network", "networks", multiple=True, metavar="RATE ...", help=text)


LIMITED_LINKS = (
    "Limited links, a host for each rank: 100mbit, unlimited, 1gbit+5ms, … (Linux, root).  [default: loopback]"
)


VALUES_HELP = "How values are written; own: the recipe's own code."


def values_option() -> Callable[[F], F]:
    """Codes of values."""
    return several("--values", default=("own",), metavar="CODE ...", help=VALUES_HELP)


def threads_option() -> Callable[[F], F]:
    """Threads of torch."""
    return several("--threads", callback=counts, default=(1, 2), metavar="T ...", help="Threads of torch.")


def peer_options(command: F) -> F:
    """Whom to race."""
    text = "DDP and its hooks.  [default: the usual ones in a network, else none]"
    command = click.option("--no-peers", is_flag=True, help="Recipes only.")(command)
    return click.option("--peer", "peers", multiple=True, metavar="NAME ...", help=text)(command)


def raced_peers(peers: Sequence[str], no_peers: bool, networks: Sequence[str]) -> list[str]:
    """Those that were named; or the usual ones, in a network and unless told otherwise."""
    from gradsieve.lab.baselines import BASELINES

    if peers and no_peers:
        raise InputError("--peer and --no-peers exclude each other")
    for name in peers:
        BASELINES[name]
    usual = [name for name, baseline in BASELINES.items() if baseline.usual]
    return list(peers) or (usual if networks and not no_peers else [])


def check_folder(path: Path | None) -> None:
    """That there is a folder to write this file to, before any measuring."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"cannot write to {path}: there is no folder {path.parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """One sentence if it fails."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}") from None


def show(report: Report, title: str, columns: Sequence[Column], as_json: bool) -> None:
    """To stdout, as a table or as JSON."""
    from gradsieve.lab.bench.report import table

    if as_json:
        click.echo(report.to_json())
    else:
        stdout().print(table(report, title, columns))


def several(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option that takes several values, and shows what it takes if it is not given."""
    return click.option(*names, multiple=True, type=str, show_default=True, **settings)
