"""Progress of `gradsieve demo`: one bar per contestant on a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.console import STARTING, stderr

if TYPE_CHECKING:
    from rich.progress import Progress

    from gradsieve.lab.bench.demo import Demo

Row = dict[str, Any]
See = Callable[[Row], None]
FIELDS = ("loss", "accuracy", "step", "traffic", "clock")


@contextmanager
def watching(demo: Demo, as_json: bool) -> Iterator[See]:
    """Yields a function that shows one event of a run, on stderr; with --json it shows nothing."""
    console = stderr()
    if as_json:
        yield lambda row: None
        return
    console.print(STARTING, style="dim")
    names = demo.names()
    if not console.is_terminal:
        yield lambda row: _print_evaluation(names, row)
        return
    with _progress() as bars:
        fields = dict.fromkeys(FIELDS, "")
        tasks = {
            label: bars.add_task(name, total=demo.steps, **fields)  # type: ignore[arg-type]
            for label, name in names.items()
        }

        def see(row: Row) -> None:
            if row["event"] == "train":
                bars.update(tasks[row["label"]], completed=row["step"], **_trained(row))
            elif row["event"] == "test":
                bars.update(tasks[row["label"]], accuracy=_accuracy(row))

        yield see


def _accuracy(row: Row) -> str:
    return f"{row['accuracy']:.1%} correct"


def _trained(row: Row) -> Row:
    return {
        "loss": f"loss {row['loss']:.3f}",
        "step": f"{row['step_seconds']:.2f} s/step",
        "traffic": f"{row['step_bytes'] / 1e3:,.0f} kB/step",
        "clock": f"{row['seconds']:.1f} s",
    }


def _print_evaluation(names: Mapping[str, str], row: Row) -> None:
    if row["event"] == "test":
        shown = f"step {row['step']:>4}  {_accuracy(row)}  {row['seconds']:6.1f} s"
        click.echo(f"{names[row['label']]:<16} {shown}", err=True)


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    right = Column(justify="right", no_wrap=True)
    texts = [TextColumn(f"{{task.fields[{name}]}}", table_column=right.copy()) for name in FIELDS]
    columns = TextColumn("[bold]{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn()
    return Progress(*columns, *texts, console=stderr())
