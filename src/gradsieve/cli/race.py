"""`gradsieve bench train`: training runs raced on a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gradsieve.cli.console import measuring
from gradsieve.cli.training import plan_of, run_folder
from gradsieve.cli.values import ManyValues, count, density, group_size, positive
from gradsieve.errors import InputError

RECIPES = ("dense", "oktopk")
AROUND = ("recipes", "values", "peers", "no_peers", "networks", "ranks", "seeds", "margin", "out", "as_json")


@click.command(cls=ManyValues)
@click.argument("workload")
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    default=RECIPES,
    show_default=True,
    metavar="NAME ...",
    help="Recipes, dense among them.",
)
@click.option(
    "--values",
    multiple=True,
    default=("exact",),
    show_default=True,
    metavar="CODE ...",
    help="How recipes write values.",
)
@click.option("--peer", "peers", multiple=True, metavar="NAME ...", help="DDP's hooks; all in a network, else none.")
@click.option("--no-peers", is_flag=True, help="Recipes only.")
@click.option(
    "--network",
    "networks",
    multiple=True,
    metavar="RATE ...",
    help="Limited links, a host for each rank: 100mbit, 1gbit, … (Linux, root).  [default: loopback]",
)
@click.option(
    "--ranks", "--hosts", "ranks", type=str, callback=count, default=4, show_default=True, metavar="P", help="Workers."
)
@click.option("--steps", type=str, callback=count, default=400, show_default=True, help="Of each run.")
@click.option("--seeds", type=str, callback=count, default=1, show_default=True, help="Runs of each: seeds 0, 1, …")
@click.option("--density", type=str, callback=density, help="Share that is sent.  [default: the preset's]")
@click.option(
    "--group-mb",
    type=str,
    callback=group_size,
    default="25",
    show_default=True,
    help="Most that is exchanged as one; none is the whole model.",
)
@click.option("--preset", default="default", show_default=True, help="Named settings: default, paper, …")
@click.option("--source", help="Source of data (gradsieve data list).  [default: the preset's]")
@click.option("--batch", type=str, callback=count, help="Samples a worker and step.  [default: the preset's]")
@click.option("--lr", "rate", type=str, callback=positive, help="Base rate.  [default: the preset's]")
@click.option("--train-samples", type=str, callback=count, help="Use the first so many only.")
@click.option("--test-samples", type=str, callback=count, help="Use the first so many only.")
@click.option("--margin", type=float, default=0.03, show_default=True, help="How far the target is above dense's end.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the runs.  [default: runs/race-…]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: environment and results.")
def train(**options: Any) -> None:  # fmt: skip
    """Train WORKLOAD with recipes and DDP's hooks in a network: time of a step, and until dense's loss is reached."""
    from gradsieve.cli.bench import show
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.bench.train import COLUMNS, TESTS, TrainPlan, bench_train
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.train.exchange import mixtures

    around = {name: options.pop(name) for name in AROUND}
    plan = plan_of(
        options, recipe="dense", values="exact", dense_steps=0, evaluate_every=max(1, options["steps"] // TESTS)
    )
    networks = around["networks"] or (LOOPBACK,)
    raced = [*around["recipes"], *_peers(around)]
    race = TrainPlan(
        plan, mixtures(plan.exchange, raced, around["values"]), range(around["seeds"]), networks, around["ranks"],
        around["margin"],
    )  # fmt: skip
    folder = run_folder(around["out"], f"race-{plan.workload}")
    with termination_unwinds(), measuring() as progress:
        report = bench_train(race, folder, progress)
    show(report, f"Training {plan.workload}", COLUMNS, around["as_json"])


@click.command("break-even", cls=ManyValues)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--step-ms",
    "steps",
    multiple=True,
    type=click.FloatRange(min=0),
    default=(0.0, 100.0, 300.0, 1000.0),
    show_default=True,
    metavar="T ...",
    help="What a step computes, besides exchanging.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: environment and results.")
def break_even(file: Path, steps: Sequence[float], as_json: bool) -> None:  # fmt: skip
    """Below which bandwidth does each recipe beat dense, and all of DDP's hooks?

    FILE is what `bench reduce --network … --json` printed for two or more networks.
    """
    from gradsieve.cli.bench import show
    from gradsieve.lab.bench import breakeven

    report = breakeven.break_even(*breakeven.read_report(file), [step / 1e3 for step in steps])
    show(report, "Break-even", breakeven.COLUMNS, as_json)


def _peers(around: dict[str, Any]) -> Sequence[str]:
    from gradsieve.lab.peers import PEERS

    if around["peers"] and around["no_peers"]:
        raise InputError("--peer and --no-peers exclude each other")
    everyone = [name for name in PEERS if name != "ddp"]  # which is dense
    for name in around["peers"]:
        PEERS[name]
    return around["peers"] or (everyone if around["networks"] and not around["no_peers"] else [])
