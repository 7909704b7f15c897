"""`gradsieve data`: list the data sources, and fetch them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from gradsieve.cli.console import stderr, stdout
from gradsieve.cli.parsing import parsed_into
from gradsieve.errors import InputError


@click.group()
def data() -> None:
    """List and fetch the training data of the workloads."""


@dataclass(frozen=True)
class DataListOptions:
    """Parsed options of `gradsieve data list`."""

    as_json: bool


@data.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@parsed_into(DataListOptions)
def listing(options: DataListOptions) -> None:
    """List the data sources, their state, and how to get each."""
    from gradsieve.lab.data.cache import cache_folder
    from gradsieve.lab.data.sources import SOURCES

    rows = [
        {"name": name, "kind": s.kind, "state": s.state, "description": s.description, "how": s.how}
        for name, s in SOURCES.items()
    ]
    if options.as_json:
        click.echo(json.dumps({"cache": str(cache_folder()), "sources": rows}, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True, style="bold")
    for column in ("kind", "state", "description", "how to get it"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    stdout().print(table)
    stdout().print(f"Cache: {cache_folder()}", soft_wrap=True)


@dataclass(frozen=True)
class DataGetOptions:
    """Parsed options of `gradsieve data get`."""

    name: str
    archive: Path | None


@data.command()
@click.argument("name")
@click.option(
    "--archive", type=click.Path(path_type=Path), metavar="PATH", help="Use this archive instead of downloading it."
)
@parsed_into(DataGetOptions)
def get(options: DataGetOptions) -> None:
    """Fetch the data source NAME into the cache."""
    from gradsieve.lab.data.sources import SOURCES

    name = options.name
    source = SOURCES[name]
    if source.fetch is None:
        raise InputError(f"{name} cannot be fetched; how to get it: {source.how}")
    if (present := source.cached()) is None:
        with _fetching() as progress:
            present = source.fetch(options.archive, progress)
    click.echo(f"{name}: {present}")


@contextmanager
def _fetching() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per phase on a terminal, else a line when a phase begins."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        known = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what)
                if not console.is_terminal:
                    console.print(f"{what} …")
            bars.update(known[what], completed=done, total=total)

        yield tell
