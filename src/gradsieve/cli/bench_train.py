"""`gradsieve bench train`: recipes and baselines race to dense DDP's final loss, on one or several networks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.bench_options import (
    RANKS_HELP,
    baseline_options,
    chosen_baselines,
    json_option,
    network_option,
    values_option,
)
from gradsieve.cli.bench_output import show
from gradsieve.cli.console import measuring
from gradsieve.cli.lab_space import enter_space_for
from gradsieve.cli.parsing import ManyValues, count_option, folder_option, parsed_into, seed_option
from gradsieve.cli.run_folder import create_run_folder
from gradsieve.cli.train_options import WorkloadOptions, workload_options

if TYPE_CHECKING:
    from gradsieve.lab.bench.race import TrainPlan

RECIPES = ("dense", "oktopk")


@dataclass(frozen=True, kw_only=True)
class BenchTrainOptions(WorkloadOptions):
    """Parsed options of `gradsieve bench train`. None means that the option was not given."""

    workload: str
    recipes: tuple[str, ...]
    values: tuple[str, ...]
    baselines: tuple[str, ...]
    no_baselines: bool
    networks: tuple[str, ...]  # empty for loopback
    ranks: int
    steps: int
    seeds: int
    first_seed: int
    evaluate_every: int | None
    margin: float
    timed_steps: int | None
    compared: tuple[Path, ...]
    out: Path | None
    as_json: bool


@click.command(cls=ManyValues)
@click.argument("workload")
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    default=RECIPES,
    show_default=True,
    metavar="NAME ...",
    help="Recipes, which must include dense. NAME:DENSITY@RATE sets the density and the base learning rate of one.",
)
@values_option()
@baseline_options
@network_option()
@count_option("--ranks", "--hosts", "ranks", default=4, metavar="P", help=RANKS_HELP)
@count_option("--steps", default=400, help="Training steps per run.")
@count_option("--seeds", default=1, help="Number of runs per recipe.")
@seed_option("--first-seed", help="Seed of the first run; later runs count up from it.")
@count_option("--evaluate-every", help="Steps between evaluations.  [default: 1/40 of the run]")
@workload_options
@click.option(
    "--margin",
    type=float,
    default=0.03,
    show_default=True,
    metavar="FRACTION",
    help="How far the target loss is above dense's final loss, as a fraction of it.",
)
@count_option(
    "--timed-steps",
    help="Train once on loopback, and time only N steps on each network.  [default: train on each network]",
)
@click.option(
    "--compared",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER ...",
    help="Folders of gradsieve compare with these runs: nothing is trained, only steps are timed. Needs --timed-steps.",
)
@folder_option("--out", help="Folder for the runs.  [default: runs/race-<workload>-<time>]")
@json_option()
@parsed_into(BenchTrainOptions)
def train(options: BenchTrainOptions) -> None:
    """Time the training of WORKLOAD to dense DDP's final loss.

    Recipes and torch's DDP hooks start from the same initialization and use the same data. With --network each rank
    runs in a host of its own on limited links. Several networks are measured one after the other.

    \b
    Example:
      gradsieve bench train resnet20 --network 100mbit 1gbit --ranks 4 --recipe dense oktopk --steps 400
    """
    enter_space_for(options.networks)
    from gradsieve.lab.bench.standings import COLUMNS
    from gradsieve.lab.bench.train import bench_train
    from gradsieve.lab.interrupts import termination_unwinds

    race = _race(options)
    folder = create_run_folder(options.out, f"race-{options.workload}")
    with termination_unwinds(), measuring() as progress:
        report = bench_train(race, folder, progress)
    show(report, f"Training {options.workload}", COLUMNS, options.as_json)


def _race(options: BenchTrainOptions) -> TrainPlan:
    from gradsieve.lab.bench.race import TESTS, TrainPlan
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.train.choice import DENSE

    run = replace(
        options.plan(options.workload, DENSE, "exact"),
        steps=options.steps,
        evaluate_every=options.evaluate_every or max(1, options.steps // TESTS),
    )
    baselines = chosen_baselines(options.baselines, options.no_baselines, options.networks)
    named = [*options.recipes, *(name for name in baselines if name != "ddp")]  # ddp is dense
    return TrainPlan(
        run=run,
        choices=run.choices(named, options.values),
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        networks=options.networks or (LOOPBACK,),
        ranks=options.ranks,
        margin=options.margin,
        timed_steps=options.timed_steps,
        compared=options.compared,
    )
