"""`gradsieve demo`: train on local workers, dense and sparse, and show what it took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.console import stderr, stdout
from gradsieve.cli.values import count, density
from gradsieve.errors import InputError, MismatchError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradsieve.lab.demo.comparison import Comparison, Tick

LINES = 10  # of progress where there is no terminal to draw on
REFRESH_PER_SECOND = 8
SLOW_BITS_PER_SECOND = 100e6


@click.command()
@click.option("--workers", type=str, callback=count, default=4, show_default=True, help="Local worker processes.")
@click.option("--steps", type=str, callback=count, default=400, show_default=True, help="Training steps of each run.")
@click.option("--density", type=str, callback=density, default=0.01, show_default=True, help="Share that is sent.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of model and batches.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results.  [default: runs/demo-<time>]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def demo(workers: int, steps: int, density: float, seed: int, out: Path | None, as_json: bool) -> None:
    """Train a small language model on local workers, dense and with Ok-Topk, and compare.

    Both runs start from the same model and see the same bytes: sources of Python's standard library. They take turns
    step by step, so that they meet the same conditions.
    """
    if workers < 2:
        raise InputError(f"workers must be at least 2, or there is nothing to exchange, got {workers}")
    folder = _folder(out)
    from gradsieve.lab.demo.comparison import DemoPlan, compare
    from gradsieve.lab.demo.figure import draw_figure

    plan = DemoPlan(workers=workers, steps=steps, density=density, seed=seed)
    with _watching(plan.steps) as on_tick:
        comparison = compare(plan, on_tick)
    draw_figure(comparison, folder / "loss.png")
    metrics = comparison.to_json()
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
    if as_json:
        click.echo(json.dumps({**metrics, "folder": str(folder)}))
    else:
        _tell(stdout(), comparison, folder)
    if comparison.unequal:
        raise MismatchError(f"workers ended with different parameters: {', '.join(comparison.unequal)}")


def _folder(out: Path | None) -> Path:
    """Made before anything is computed: a run whose result cannot be written should not start."""
    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None
    return folder


@contextmanager
def _watching(steps: int) -> Iterator[Callable[[Tick], None]]:
    console = stderr()
    console.print("Starting workers; the first steps also compile kernels …", style="dim")
    if console.is_terminal:
        with _bars(console, steps) as on_tick:
            yield on_tick
    else:
        yield lambda tick: _line(console, tick, steps)


@contextmanager
def _bars(console: Console, steps: int) -> Iterator[Callable[[Tick], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description:<8}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[milliseconds]:.0f} ms/step"),
        TextColumn("{task.fields[megabytes]:.1f} MB received"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=REFRESH_PER_SECOND) as progress:
        tasks: dict[str, Any] = {}

        def on_tick(tick: Tick) -> None:
            fields: dict[str, Any] = {
                "loss": tick.loss,
                "milliseconds": tick.seconds * 1e3,
                "megabytes": tick.bytes_received / 1e6,
            }
            if tick.run not in tasks:
                tasks[tick.run] = progress.add_task(tick.run, total=steps, **fields)
            progress.update(tasks[tick.run], completed=tick.step, **fields)

        yield on_tick


def _line(console: Console, tick: Tick, steps: int) -> None:
    if tick.step % max(1, steps // LINES) == 0:
        console.print(
            f"{tick.run:<8} step {tick.step:>4}/{steps}  loss {tick.loss:.3f}  {tick.seconds * 1e3:4.0f} ms  "
            f"{tick.bytes_received / 1e6:8.2f} MB received"
        )


def _tell(console: Console, comparison: Comparison, folder: Path) -> None:
    console.print(_conditions(comparison))
    console.print(_table(comparison))
    console.print(_on_a_network(comparison))
    for name, run in comparison.runs.items():
        verdict = "equal bit for bit" if run.replicas_equal else "[red]NOT EQUAL[/red]"
        workers = comparison.plan.workers
        console.print(f"{name}: parameters on {workers} workers are {verdict} (sha256 {run.digest[:16]})")
    console.print(f"Results: {folder}/loss.png and {folder}/metrics.json")


def _conditions(comparison: Comparison) -> str:
    plan = comparison.plan
    return (
        f"{plan.workers} workers, {plan.steps} steps, {plan.batch_per_worker} bytes predicted per step and worker, "
        f"{comparison.num_parameters:,} parameters, Gloo over loopback; "
        f"oktopk: density {plan.density:g} after {plan.dense_steps} dense steps"
    )


def _on_a_network(comparison: Comparison) -> str:
    """Loopback hardly notices bytes; what they would cost elsewhere is arithmetic, and said to be."""
    dense, sparse = (
        run.summary["bytes_received_per_step"] * 8 / SLOW_BITS_PER_SECOND for run in comparison.runs.values()
    )
    return (
        f"Loopback is no slow network: at {SLOW_BITS_PER_SECOND / 1e6:.0f} Mbit/s these bytes alone would take "
        f"{dense * 1e3:.0f} ms a step dense, {sparse * 1e3:.0f} ms sparse (computed, not measured)."
    )


def _table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table()
    dense, sparse = (run.summary for run in comparison.runs.values())
    table.add_column("")
    for name in (*comparison.runs, "dense / oktopk"):
        table.add_column(name, justify="right", no_wrap=True)
    for field, label, written in _ROWS:
        ratio = dense[field] / sparse[field] if sparse[field] else float("nan")
        table.add_row(label, written(dense[field]), written(sparse[field]), f"{ratio:.3g}")
    return table


_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("held_out_loss", "held-out loss, nats per byte", "{:.3f}".format),
    ("held_out_accuracy", "held-out accuracy of the next byte", "{:.1%}".format),
    ("bytes_received_per_step", "received per step and worker, mean", lambda b: f"{b / 1e6:.3f} MB"),
    ("bytes_received_ordinary_step", "received in an ordinary step", lambda b: f"{b / 1e6:.3f} MB"),
    ("step_seconds", "step time, median", lambda s: f"{s * 1e3:.1f} ms"),
    ("exchange_seconds", "of which exchange, median", lambda s: f"{s * 1e3:.1f} ms"),
)
