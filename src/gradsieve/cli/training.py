"""Options that `train`, `compare` and `demo` share, and what they do around a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradsieve.cli.values import count, density, group_size, positive

if TYPE_CHECKING:
    from gradsieve.lab.train.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


def workload_options(command: F) -> F:
    """What to train, on what, and how much is sent."""
    return _with(
        command,
        click.option("--preset", default="default", show_default=True, help="Named settings: default, paper, …"),
        click.option("--source", help="Source of data (gradsieve data list).  [default: the preset's]"),
        click.option("--data", type=click.Path(), help="Folder of your data, where the source is what you have."),
        click.option("--density", type=str, callback=density, help="Share that is sent.  [default: the preset's]"),
        click.option("--dense-steps", type=click.IntRange(min=0), default=0, help="Send everything at first."),
        click.option("--group-mb", type=str, callback=group_size, default="25", show_default=True,
                     help="Most that is exchanged as one; none is the whole model."),
        click.option("--batch", type=str, callback=count, help="Samples a worker and step.  [default: the preset's]"),
        click.option("--lr", "rate", type=str, callback=positive, help="Base rate.  [default: the preset's]"),
        click.option("--train-samples", type=str, callback=count, help="Use the first so many only."),
        click.option("--test-samples", type=str, callback=count, help="Use the first so many only."),
    )  # fmt: skip


def run_options(command: F) -> F:
    """What to train, for how long, how closely to look."""
    return _with(
        command,
        workload_options,
        click.option("--workers", type=str, callback=count,
                     help="Local worker processes; under torchrun, Slurm or MPI their number holds.  [default: 4]"),
        click.option("--epochs", type=str, callback=positive, help="How long.  [default: the preset's]"),
        click.option("--steps", type=str, callback=count, help="How long, instead of epochs."),
        click.option("--log-every", type=str, callback=count, help="Steps between rows of metrics.  [default: 1 %]"),
        click.option("--evaluate-every", type=str, callback=count, help="Steps between tests.  [default: 1/15]"),
        click.option("--evaluate", type=click.Choice(["test", "validation"]), default="test", show_default=True,
                     help="Part of the data that is scored; validation is for tuning, and only gpt has it."),
        click.option("--timeout", type=str, callback=positive, help="Seconds to wait for a peer.  [default: 300]"),
        click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout; also where it is no terminal."),
    )  # fmt: skip


def _with(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def plan_of(settings: dict[str, Any], **more: Any) -> Plan:
    """From what the options gave."""
    from gradsieve.lab.train.choice import Choice
    from gradsieve.lab.train.plan import Plan
    from gradsieve.lab.workloads import WORKLOADS

    names = ("recipe", "density", "values", "dense_steps", "group_mb")
    given = {**settings, **more}
    if given["recipe"] is None:
        given["recipe"] = WORKLOADS[given["workload"]].preset(given["preset"]).sieve.recipe
    choice = Choice(**{name: given.pop(name) for name in names})
    return Plan(choice=choice, **given)


def run_folder(out: Path | None, name: str) -> Path:
    """Where results go; made by rank 0, whose name for it all will use."""
    from gradsieve.lab.train.journal import make_folder
    from gradsieve.lab.train.world import found_world

    folder = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    world = found_world()
    return make_folder(folder) if world is None or world.rank == 0 else folder


@contextmanager
def last_words(folder: Path) -> Iterator[None]:
    """If a worker fails, what it printed last is shown before the error."""
    from gradsieve.lab.rank_processes import RankProcessError
    from gradsieve.lab.train.launch import last_lines, log_file

    try:
        yield
    except RankProcessError as error:
        if lines := last_lines(folder, error.rank):
            click.echo(f"Last lines of rank {error.rank} ({log_file(folder, error.rank)}):", err=True)
            for line in lines:
                click.echo(f"  {line}", err=True)
        raise
