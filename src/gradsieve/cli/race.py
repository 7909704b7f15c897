"""`gradsieve bench train`, `break-even` and `frontier`: races on networks, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gradsieve.cli.console import measuring
from gradsieve.cli.measures import (
    LIMITED_LINKS,
    check_folder,
    json_option,
    network_option,
    peer_options,
    raced_peers,
    show,
    values_option,
    writing,
)
from gradsieve.cli.training import plan_of, run_folder, workload_options
from gradsieve.cli.values import ManyValues, count

RECIPES = ("dense", "oktopk")
AROUND = (
    "recipes",
    "values",
    "peers",
    "no_peers",
    "networks",
    "ranks",
    "seeds",
    "first_seed",
    "margin",
    "timed_steps",
    "compared",
    "out",
    "as_json",
)


@click.command(cls=ManyValues)
@click.argument("workload")
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    default=RECIPES,
    show_default=True,
    metavar="NAME ...",
    help="Recipes, dense among them; NAME:DENSITY@RATE has a density and a base rate of its own.",
)
@values_option()
@peer_options
@network_option(LIMITED_LINKS)
@click.option(
    "--ranks", "--hosts", "ranks", type=str, callback=count, default=4, show_default=True, metavar="P", help="Workers."
)
@click.option("--steps", type=str, callback=count, default=400, show_default=True, help="Of each run.")
@click.option("--seeds", type=str, callback=count, default=1, show_default=True, help="Runs of each.")
@click.option(
    "--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the first run; then + 1, …"
)
@click.option("--evaluate-every", type=str, callback=count, help="Steps between tests.  [default: 1/40]")
@workload_options
@click.option("--margin", type=float, default=0.03, show_default=True, help="How far the target is above dense's end.")
@click.option(
    "--timed-steps",
    type=str,
    callback=count,
    help="Train once, on loopback, and take the time of so many steps on each network.  [default: train on each]",
)
@click.option(
    "--compared",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER ...",
    help="Folders of `gradsieve compare` that have the runs: only times are taken, with --timed-steps.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the runs.  [default: runs/race-…]")
@json_option()
def train(**options: Any) -> None:
    """Train WORKLOAD with recipes and DDP's hooks in a network: time of a step, and until dense's loss is reached."""
    from gradsieve.lab.bench.race import TESTS, TrainPlan
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.bench.standings import COLUMNS
    from gradsieve.lab.bench.train import bench_train
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.train.choice import DENSE, parse_choices

    around = {name: options.pop(name) for name in AROUND}
    evaluate_every = options.pop("evaluate_every") or max(1, options["steps"] // TESTS)
    plan = plan_of(options, recipe=DENSE, values="exact", evaluate_every=evaluate_every)
    networks = around["networks"]
    peers = raced_peers(around["peers"], around["no_peers"], networks)
    named = [*around["recipes"], *(name for name in peers if name != "ddp")]  # which is dense
    raced = parse_choices(plan.choice, named, around["values"])
    race = TrainPlan(
        plan,
        raced,
        range(around["first_seed"], around["first_seed"] + around["seeds"]),
        networks or (LOOPBACK,),
        around["ranks"],
        around["margin"],
        around["timed_steps"],
        around["compared"],
    )
    folder = run_folder(around["out"], f"race-{plan.workload}")
    with termination_unwinds(), measuring() as progress:
        report = bench_train(race, folder, progress)
    show(report, f"Training {plan.workload}", COLUMNS, around["as_json"])


@click.command("break-even", cls=ManyValues)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--step-ms",
    "steps",
    multiple=True,
    type=float,
    default=(0.0, 100.0, 300.0, 1000.0),
    show_default=True,
    metavar="T ...",
    help="What a step computes, besides exchanging.",
)
@json_option()
def break_even(files: Sequence[Path], steps: Sequence[float], as_json: bool) -> None:
    """Below which bandwidth does each recipe beat dense, and all of DDP's hooks?

    FILE is what `bench reduce --network … --json` printed for two or more networks, or for one each. What was
    measured on one network only is left out.
    """
    from gradsieve.lab.bench import breakeven

    report = breakeven.break_even(*breakeven.read_reports(files), [step / 1e3 for step in steps])
    show(report, "Break-even", breakeven.COLUMNS, as_json)


@click.command("frontier", cls=ManyValues)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it to this PNG file.")
@json_option()
def frontier(files: Sequence[Path], plot: Path | None, as_json: bool) -> None:
    """Loss against bytes and seconds: how far is each recipe ahead of baselines that send as little?

    FILE is race.json of `bench train`; several must have the same workload, ranks and steps.
    """
    from gradsieve.lab.bench import frontier as found
    from gradsieve.lab.plots.frontier import draw_frontier

    check_folder(plot)
    report = found.frontier(*found.read_races(files))
    show(report, "Frontier", found.COLUMNS, as_json)
    if plot is not None:
        with writing(plot):
            draw_frontier(plot, report)
