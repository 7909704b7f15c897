"""`gradsieve tune`: which setting is fastest here, and does any beat dense?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.bench_options import RANKS_HELP, json_option, network_option
from gradsieve.cli.bench_output import check_folder, writing
from gradsieve.cli.console import measuring, stdout
from gradsieve.cli.lab_space import enter_space_for
from gradsieve.cli.parsing import ManyValues, count_option, densities, parsed_into, positive_option

if TYPE_CHECKING:
    from rich.table import Table

    from gradsieve.lab.tune.session import Tuning

LEARNING = "Times are predicted, learning is not: docs/optimizers.md says what each setting does to the loss."


@dataclass(frozen=True)
class TuneOptions:
    """Parsed options of `gradsieve tune`."""

    parameters: int | None
    model: str | None
    compute_seconds: float | None
    ranks: int | None
    networks: tuple[str, ...]  # empty for loopback
    recipes: tuple[str, ...]  # empty for all
    densities: tuple[float, ...]
    values: tuple[str, ...]
    check: bool
    all_methods: bool
    plot: Path | None
    as_json: bool


@click.command(cls=ManyValues)
@count_option("--parameters", help="Parameters of the model, such as 125M.  [default: 25M]")
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Function without arguments that returns (model, loss); loss(model) runs one batch. Timed on the CPU.",
)
@positive_option(
    "--compute-seconds",
    metavar="S",
    help="Seconds that one step computes without any exchange, as on a GPU.  [default: none is counted]",
)
@count_option("--ranks", "--hosts", "ranks", metavar="P", help=f"{RANKS_HELP}  [default: 4, or the launcher's]")
@network_option()
@click.option("--recipe", "recipes", multiple=True, metavar="NAME ...", help="Recipes to compare.  [default: all]")
@click.option(
    "--density",
    "densities",
    multiple=True,
    type=str,
    callback=densities,
    metavar="D ...",
    help="Densities of gradient recipes to compare.  [default: 0.001 0.01 0.02 0.05]",
)
@click.option(
    "--values",
    multiple=True,
    metavar="CODE ...",
    help="Value codes of gradient recipes to compare.  [default: exact bf16 int8]",
)
@click.option("--check", is_flag=True, help="Run the three best settings for real and print the predictions' error.")
@click.option("--all", "all_methods", is_flag=True, help="Show every setting, not only the best few.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot predicted step time against bandwidth to this PNG file.",
)
@json_option()
@parsed_into(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the fastest setting for your network and your model.

    Measures latency, bandwidth, memory and short exchanges, predicts the time per step of every setting, and
    recommends one. Alone it starts local ranks; with --network each has a host of its own. Under torchrun, Slurm
    (srun) or MPI (mpiexec) it is one rank of their job, and rank 0 prints.

    \b
    Example:
      torchrun --nnodes 4 ... -m gradsieve tune --parameters 125M --compute-seconds 0.4
    """
    check_folder(options.plot)
    enter_space_for(options.networks)
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.tune.plan import TunePlan
    from gradsieve.lab.tune.run import SilentError
    from gradsieve.lab.tune.run import tune as run

    plan = TunePlan(
        options.parameters,
        options.model,
        options.compute_seconds,
        options.recipes,
        options.densities,
        options.values,
        options.check,
    )
    try:
        with termination_unwinds(), measuring() as progress:
            tunings = run(plan, options.ranks, options.networks, progress)
    except SilentError:
        raise click.exceptions.Exit(2) from None
    if not tunings:
        return  # another rank prints
    if options.plot is not None:
        from gradsieve.lab.plots.tune import draw_tuning

        with writing(options.plot):
            draw_tuning(options.plot, tunings)
    _show(tunings, options)


def _show(tunings: Sequence[Tuning], options: TuneOptions) -> None:
    if options.as_json:
        from gradsieve.lab.bench.report import environment

        tuned = [tuning.to_json() for tuning in tunings]
        click.echo(json.dumps({"environment": environment(), "tunings": tuned}, indent=2))
        return
    for tuning in tunings:
        _print(tuning, options.all_methods)


def _print(tuning: Tuning, all_methods: bool) -> None:
    from gradsieve.lab.tune.report import measured_sentences

    console = stdout()
    for sentence in measured_sentences(tuning):
        console.print(sentence)
    console.print(_table(tuning, all_methods))
    if tuning.checked:
        console.print(_check_table(tuning))
    for sentence in (*tuning.recommendation.sentences, LEARNING):
        console.print(sentence)
    console.print(f"\n    {tuning.recommendation.method.line}\n", markup=False)


def _table(tuning: Tuning, all_methods: bool) -> Table:
    from rich import box
    from rich.table import Table

    from gradsieve.lab.tune.report import COLUMNS, job_sentence, rows

    title = f"Predicted time per step: {job_sentence(tuning)}, {tuning.network}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(COLUMNS):
        shown.add_column(column.title, justify="right" if number else "left", no_wrap=True)
    for row in rows(tuning, all_methods):
        cells = (column.write(row[column.field]) if column.field in row else "" for column in COLUMNS)
        shown.add_row(*cells, style="dim" if row["peer"] else "")
    return shown


def _check_table(tuning: Tuning) -> Table:
    from rich import box
    from rich.table import Table

    from gradsieve.lab.bench.report import milliseconds

    shown = Table(title="Check: the best settings, run for real", title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(("method", "predicted", "measured", "error")):
        shown.add_column(name, justify="right" if number else "left", no_wrap=True)
    for each in tuning.checked:
        times = milliseconds(each.predicted_seconds), milliseconds(each.measured_seconds)
        shown.add_row(each.method.name, *times, f"{each.error:+.0%}")
    return shown
