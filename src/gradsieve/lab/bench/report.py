"""The one form all measurements are reported in: the environment, and rows that say what was measured under what."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsieve.lab.machine import cpu_model, num_cores
from gradsieve.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
"""`method` or `recipe`; `numel density ranks threads repeats`; `seconds`, the median; and what else was measured."""

BACKEND = "gloo all_reduce"  # the row that `speedup_over_dense` refers to, where exchanges are measured
CONDITIONS = ("network", "numel", "density", "ranks", "threads")
PACKAGES = ("torch", "numpy", "numba")


@dataclass(frozen=True)
class Report:
    """One run of a measuring command."""

    environment: dict[str, Any]
    results: list[Row]

    def to_json(self) -> str:
        """One object, as every `--json` prints it."""
        return json.dumps({"environment": self.environment, "results": self.results}, indent=2)


class Column(NamedTuple):
    """A column of a table: a field of the rows, its title, and how a value is written."""

    field: str
    title: str
    write: Callable[[Any], str] = str


def environment() -> dict[str, Any]:
    """Where and with what a measurement is made."""
    return {
        "gradsieve": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "cpu": cpu_model(),
        "cores": num_cores(),
        "platform": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(report: Report, title: str, columns: Sequence[Column]) -> Table:
    """The rows for people, in the order they were measured; conditions that all share are in the title."""
    from rich import box
    from rich.table import Table

    rows, known = report.results, report.environment
    shared = {name for name in CONDITIONS if len({row.get(name) for row in rows}) == 1}
    conditions = ", ".join(f"{c.title} {c.write(rows[0][c.field])}" for c in columns if c.field in shared)
    shown = Table(
        title=f"{title}; {conditions}" if conditions else title,
        caption=f"{known['cpu']}, {known['cores']} cores, torch {known['torch']}, gradsieve {known['gradsieve']}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    varying = [c for c in columns if c.field not in shared and any(c.field in row for row in rows)]
    for number, column in enumerate(varying):
        shown.add_column(column.title, justify="right" if number else "left", no_wrap=True)
    for number, row in enumerate(rows):
        if number and any(row.get(name) != rows[number - 1].get(name) for name in CONDITIONS):
            shown.add_section()
        shown.add_row(*(column.write(row[column.field]) if column.field in row else "" for column in varying))
    return shown


def milliseconds(seconds: float) -> str:
    """Such as `8.51 ms`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def thousands(count: float) -> str:
    """Such as `14,700,000`."""
    return f"{count:,.0f}"


def megabytes(num_bytes: float) -> str:
    """Such as `1.41 MB`."""
    return f"{num_bytes / 1e6:.3g} MB"


def times(ratio: float) -> str:
    """Such as `3.1x`."""
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
