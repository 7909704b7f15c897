"""`gradsieve bench break-even` and `bench frontier`: computed from the JSON files of earlier measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.bench_options import json_option
from gradsieve.cli.bench_output import check_folder, show, writing
from gradsieve.cli.parsing import ManyValues, parsed_into

if TYPE_CHECKING:
    from gradsieve.lab.plots.frontier import Panels


@dataclass(frozen=True)
class BreakEvenOptions:
    """Parsed options of `gradsieve bench break-even`."""

    files: tuple[Path, ...]
    step_ms: tuple[float, ...]
    as_json: bool


@click.command("break-even", cls=ManyValues)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--step-ms",
    multiple=True,
    type=float,
    default=(0.0, 100.0, 300.0, 1000.0),
    show_default=True,
    metavar="T ...",
    help="Time per step without the exchange, in milliseconds.",
)
@json_option()
@parsed_into(BreakEvenOptions)
def break_even(options: BreakEvenOptions) -> None:
    """Compute the bandwidth below which a recipe beats dense DDP.

    The table also has the bandwidth below which it beats all of torch's DDP hooks. FILE holds the output of
    `bench reduce --network … --json` for two or more networks, or for one network per file. Recipes that were measured
    on one network only are left out.
    """
    from gradsieve.lab.bench import breakeven

    rows, environment = breakeven.read_reports(options.files)
    report = breakeven.break_even(rows, environment, [milliseconds / 1e3 for milliseconds in options.step_ms])
    show(report, "Break-even", breakeven.COLUMNS, options.as_json)


@dataclass(frozen=True)
class FrontierOptions:
    """Parsed options of `gradsieve bench frontier`."""

    files: tuple[Path, ...]
    plot: Path | None
    panels: Panels
    as_json: bool


@click.command("frontier", cls=ManyValues)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot the frontier to this PNG file.")
@click.option(
    "--panels",
    type=click.Choice(["all", "bytes", "seconds"]),
    default="all",
    show_default=True,
    help="Panels of the plot: loss against bytes, against training time, or both.",
)
@json_option()
@parsed_into(FrontierOptions)
def frontier(options: FrontierOptions) -> None:
    """Compare the loss of recipes and baselines at equal traffic.

    They are also compared at equal training time. The margin of a recipe is how much higher the loss of the best
    baseline is that needs no more bytes, or no more seconds. FILE is the race.json of a `bench train`. Several files
    must have the same workload, ranks and steps.
    """
    check_folder(options.plot)
    from gradsieve.lab.bench import frontier as analysis
    from gradsieve.lab.plots.frontier import draw_frontier

    rows, environment = analysis.read_races(options.files)
    report = analysis.frontier(rows, environment)
    show(report, "Frontier", analysis.COLUMNS, options.as_json)
    if options.plot is not None:
        with writing(options.plot):
            draw_frontier(options.plot, report, options.panels)
