"""`gradsieve data`: which data there is, and getting it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from gradsieve.cli.console import stderr, stdout
from gradsieve.errors import InputError


@click.group()
def data() -> None:
    """List and fetch the data of the workloads."""


@data.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def listing(as_json: bool) -> None:
    """Sources of data, and what it takes to have them."""
    from gradsieve.lab.data.cache import cache_folder
    from gradsieve.lab.data.sources import SOURCES

    rows = [
        {"name": name, "kind": s.kind, "state": s.state, "description": s.description, "how": s.how}
        for name, s in SOURCES.items()
    ]
    if as_json:
        click.echo(json.dumps({"cache": str(cache_folder()), "sources": rows}, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True, style="bold")
    for column in ("kind", "state", "description", "how to have it"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    stdout().print(table)
    stdout().print(f"Cache: {cache_folder()}", soft_wrap=True)


@data.command()
@click.argument("name")
@click.option("--archive", type=click.Path(path_type=Path), help="A copy you have, instead of a download.")
def get(name: str, archive: Path | None) -> None:
    """Put NAME into the cache."""
    from gradsieve.lab.data.sources import SOURCES

    source = SOURCES[name]
    if source.fetch is None:
        raise InputError(f"{name} cannot be fetched; how to have it: {source.how}")
    if (present := source.cached()) is None:
        with _fetching() as progress:
            present = source.fetch(archive, progress)
    click.echo(f"{name}: {present}")


@contextmanager
def _fetching() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each phase; without a terminal, a line when a phase begins."""
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
