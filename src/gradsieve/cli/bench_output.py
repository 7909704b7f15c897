"""Output of `gradsieve bench`: a table or JSON on stdout, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.console import stdout
from gradsieve.errors import InputError

if TYPE_CHECKING:
    from gradsieve.lab.bench.report import Column, Report


def show(report: Report, title: str, columns: Sequence[Column], as_json: bool) -> None:
    from gradsieve.lab.bench.report import table

    if as_json:
        click.echo(report.to_json())
    else:
        stdout().print(table(report, title, columns))


def check_folder(path: Path | None) -> None:
    """Refuse a file in a missing folder before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"cannot write to {path}: there is no folder {path.parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}") from None
