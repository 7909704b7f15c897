"""Where output goes: results to stdout, everything about how it is going to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 160  # a table that is not for a terminal is not squeezed


def stdout() -> Console:
    """For results."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def stderr() -> Console:
    """For progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def measuring() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each thing measured, if anybody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        known = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what)
            bars.update(known[what], completed=done, total=total)

        yield tell
