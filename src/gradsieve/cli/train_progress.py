"""Progress of `gradsieve train`: bars on a terminal, JSON lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.console import STARTING, stderr, stdout
from gradsieve.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

Row = dict[str, Any]
See = Callable[[Row], None]
PHASES = ("data", "forward", "backward", "exchange", "update")


@contextmanager
def watching(folder: Path, as_json: bool, tensorboard: bool = False) -> Iterator[See]:
    """Yields a function that shows one event of the run, and writes it to TensorBoard on request."""
    with _board(folder, tensorboard) as note, _shown(as_json) as show:

        def see(row: Row) -> None:
            note(row)
            show(row)

        yield see


@contextmanager
def _shown(as_json: bool) -> Iterator[See]:
    if as_json or not sys.stdout.isatty():
        yield lambda row: click.echo(json.dumps(_finite(row)))
        return
    with Bars() as bars:
        yield bars.see


def _finite(row: Row) -> Row:
    from gradsieve.lab.train.journal import finite

    shown: Row = finite(row)
    return shown


class Bars:
    """A progress bar with loss, metric, step time by phase, bytes per step and time left."""

    def __init__(self) -> None:
        self._bars = _progress()
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self._bars.console.print(STARTING, style="dim")
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def see(self, row: Row) -> None:
        name = row["label"]
        match row["event"]:
            case "start":
                fields: dict[str, Any] = {"loss": "", "score": "", "time": "", "traffic": ""}
                self._tasks[name] = self._bars.add_task(name, total=row["total_steps"], completed=row["step"], **fields)
                self._bars.console.print(_heading(row), style="dim")
            case "train":
                self._bars.update(self._tasks[name], completed=row["step"], **_training(row))
            case "test":
                self._bars.update(self._tasks[name], score=first_score(row))
            case "end":
                self._bars.stop()
                _tell_end(row)


def _heading(row: Row) -> str:
    return (
        f"{row['workers']} ranks, {row['parameters']:,} parameters, {row['train_samples']:,} samples, "
        f"{row['total_steps']:,} steps; {row['folder']}"
    )


def _training(row: Row) -> Row:
    parts = " ".join(f"{name} {row[f'{name}_seconds'] * 1e3:.0f}" for name in PHASES if row[f"{name}_seconds"] >= 5e-4)
    return {
        "loss": f"loss {row['loss']:.3f}",
        "time": f"{row['step_seconds'] * 1e3:.0f} ms ({parts})",
        "traffic": f"{row['step_bytes'] / 1e6:.3g} MB/step",
    }


def first_score(row: Row) -> str:
    """The first metric of an evaluation, which is the one to compare by."""
    skipped = {"event", "step", "epoch", "label", "seed", "seconds", "bytes_received", "skipped_steps"}
    name, value = next((name, value) for name, value in row.items() if name not in skipped)
    return f"{name.replace('_', ' ')} {value:.3f}"


def _tell_end(row: Row) -> None:
    scores = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in row["scores"].items())
    phases = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in row["phase_seconds"].items())
    equal = "equal bit for bit" if row["replicas_equal"] else "NOT EQUAL"
    console = stdout()
    console.print(f"{row['workload']}, {row['recipe']}: {row['steps']:,} steps; {row['evaluated']} {scores}")
    console.print(f"{row['step_seconds'] * 1e3:.1f} ms per step ({phases}), "
                  f"{row['bytes_received_per_step'] / 1e6:.3g} MB received per step (largest of all ranks); "
                  f"replicas are {equal}")  # fmt: skip


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = [TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "score", "time", "traffic")]
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), *texts)
    return Progress(*columns, TimeRemainingColumn(), console=stderr())


@contextmanager
def _board(folder: Path, wanted: bool) -> Iterator[See]:
    if not wanted:
        yield lambda row: None
        return
    writer = _writer(folder / "tensorboard")
    try:
        yield lambda row: _scalars(writer, row)
    finally:
        writer.close()


def _writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise InputError("--tensorboard needs tensorboardX: pip install 'gradsieve[tensorboard]'") from None
    return SummaryWriter(str(folder))


def _scalars(writer: Any, row: Row) -> None:
    if row["event"] not in ("train", "test", "probe"):
        return
    for name, value in row.items():
        if name not in ("event", "step", "label", "seed") and isinstance(value, int | float):
            writer.add_scalar(f"{row['event']}/{name}", value, row["step"])
