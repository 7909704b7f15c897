"""`gradsieve compare`: several recipes on the same workload, data and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gradsieve.cli.comparison import Comparison, run_comparison
from gradsieve.cli.parsing import count_option, folder_option, names, parsed_into, seed_option
from gradsieve.cli.run_folder import create_run_folder
from gradsieve.cli.train_options import RunOptions, run_options


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RunOptions):
    """Parsed options of `gradsieve compare`. None means that the option was not given."""

    workload: str
    recipes: tuple[str, ...]
    values: tuple[str, ...]
    seeds: int
    first_seed: int
    out: Path | None
    as_json: bool


@click.command()
@click.argument("workload")
@click.option(
    "--recipes",
    callback=names,
    default="dense,topka,gtopk,gaussiank,oktopk",
    show_default=True,
    metavar="NAME,…",
    help="Recipes, separated by commas. A suffix changes one: -nofeedback drops error feedback, -momentum is DGC's "
    "momentum correction, -nomomentum is an optimizer without momentum, -lazy is LazyAdam, -updates exchanges updates "
    "instead of gradients. fp16, powersgd-2, … are torch's DDP hooks. NAME:DENSITY sets the density of one recipe, "
    "NAME@RATE its base learning rate.",
)
@click.option(
    "--values",
    callback=names,
    default="own",
    show_default=True,
    metavar="CODE,…",
    help="Value codes, separated by commas: exact, bf16, int8, …; own: the recipe's own code.",
)
@count_option("--seeds", default=3, help="Number of runs per recipe.")
@seed_option("--first-seed", help="Seed of the first run; later runs count up from it.")
@run_options
@folder_option("--out", help="Folder for results.  [default: runs/compare-<workload>-<time>]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@parsed_into(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Train WORKLOAD with several recipes and compare them.

    All runs of one seed start from the same initialization and use the same data. They take turns on the same ranks,
    so that other load on the machine affects them equally.

    \b
    Example:
      gradsieve compare resnet20 --recipes dense,gtopk,oktopk --density 0.01 --seeds 3
    """
    from gradsieve.lab.train.choice import DENSE

    plan = options.plan(options.workload, DENSE, "exact")
    run_comparison(
        Comparison(
            plan,
            plan.choices(options.recipes, options.values),
            range(options.first_seed, options.first_seed + options.seeds),
            create_run_folder(options.out, f"compare-{plan.workload}"),
            options.workers,
            options.timeout,
            options.as_json,
        )
    )
