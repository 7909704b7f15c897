"""The folder of a run: its name, and the logs of its rank processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click


def create_run_folder(out: Path | None, name: str) -> Path:
    """Create `out`, or `runs/NAME-TIME` if it is None.

    Under a launcher only rank 0 creates it. The other ranks later receive its path, since the time may differ.
    """
    from gradsieve.lab.train.journal import make_folder
    from gradsieve.lab.train.world import found_world

    folder = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    world = found_world()
    return make_folder(folder) if world is None or world.rank == 0 else folder


@contextmanager
def log_shown_on_failure(folder: Path) -> Iterator[None]:
    """If a rank process fails, print the last lines of its log before the error."""
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
