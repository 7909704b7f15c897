"""`gradsieve list`: the contents of the registries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.console import stdout
from gradsieve.cli.parsing import parsed_into

if TYPE_CHECKING:
    from rich.table import Table

    from gradsieve.lab.catalog import Entry


@dataclass(frozen=True)
class ListOptions:
    """Parsed options of `gradsieve list`."""

    as_json: bool


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@parsed_into(ListOptions)
def listing(options: ListOptions) -> None:
    """List recipes, selectors and reducers with their settings."""
    from gradsieve.lab.catalog import catalog

    entries = catalog()
    if options.as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    console = stdout()
    for kind, rows in entries.items():
        console.print(_table(kind, rows))


def _table(kind: str, rows: list[Entry]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=kind, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("description", overflow="fold")
    table.add_column("settings", overflow="fold")
    for row in rows:
        lossy = "" if row.get("conserving", True) else " (not conserving, for comparison only)"
        settings = ", ".join(f"{name}={_written(value)}" for name, value in row["settings"].items())
        table.add_row(row["name"], row["description"] + lossy, settings)
    return table


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "(" + ", ".join(map(_written, value)) + ")"
    return str(value)
