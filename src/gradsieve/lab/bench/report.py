"""The common form of all reports: the environment, and rows with conditions and measurements."""

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
"""`method` or `recipe`; the conditions `numel density ranks threads repeats`; `seconds`, the median; other fields."""

BACKEND = "gloo all_reduce"  # the row that `speedup_over_dense` refers to in `bench reduce`
CONDITIONS = ("network", "numel", "density", "ranks", "threads")
PACKAGES = ("torch", "numpy", "numba")


@dataclass(frozen=True)
class Report:
    """The result of one benchmark command."""

    environment: dict[str, Any]
    results: list[Row]

    def to_json(self) -> str:
        """One JSON object, as `--json` prints it."""
        return json.dumps({"environment": self.environment, "results": self.results}, indent=2)


class Column(NamedTuple):
    """A column of a table: a field of the rows, its title, and the format of its values."""

    field: str
    title: str
    write: Callable[[Any], str] = str


def environment() -> dict[str, Any]:
    """Versions, processor and date of a measurement."""
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
    """The rows in the order they were measured. Conditions that all rows share are in the title."""
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


def method_name(row: Row) -> str:
    """The recipe, followed by its value code unless that is `exact`."""
    return f"{row['recipe']} {row['values']}" if row.get("values") not in (None, "", "exact") else str(row["recipe"])


def milliseconds(seconds: float) -> str:
    """For example `8.51 ms`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def thousands(count: float) -> str:
    """For example `14,700,000`."""
    return f"{count:,.0f}"


def megabytes(num_bytes: float) -> str:
    """For example `1.41 MB`."""
    return f"{num_bytes / 1e6:.3g} MB"


def times(ratio: float) -> str:
    """For example `3.1x`."""
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
