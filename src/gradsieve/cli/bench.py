"""`gradsieve bench`: the group of measuring commands. All of them print the same form of table or JSON."""

from __future__ import annotations

import click

from gradsieve.cli.bench_analysis import break_even, frontier
from gradsieve.cli.bench_compute import optimizer, select
from gradsieve.cli.bench_exchange import overlap, reduce, wire
from gradsieve.cli.bench_train import train


@click.group()
def bench() -> None:
    """Measure times and bytes on this machine.

    All commands print a table, or JSON with --json. break-even and frontier read the JSON of earlier measurements.
    """


for command in (select, reduce, wire, overlap, optimizer, train, break_even, frontier):
    bench.add_command(command)
