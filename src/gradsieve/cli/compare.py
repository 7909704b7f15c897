"""`gradsieve compare`: several recipes on the same workload, data and seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.console import stderr, stdout
from gradsieve.cli.training import last_words, plan_of, run_folder, run_options
from gradsieve.cli.values import count, names
from gradsieve.errors import MismatchError

if TYPE_CHECKING:
    from rich.table import Table

    from gradsieve.lab.train.choice import Choice
    from gradsieve.lab.train.plan import Plan

Row = dict[str, Any]
AROUND = ("workers", "timeout", "as_json", "out", "recipes", "seeds", "first_seed", "values")


@click.command()
@click.argument("workload")
@click.option(
    "--recipes",
    callback=names,
    default="dense,topka,gtopk,gaussiank,oktopk",
    show_default=True,
    help="With commas; randomk, oktopk-nofeedback and the like show what fails; oktopk-momentum has DGC's correction, "
    "oktopk-nomomentum none at all, oktopk-lazy an Adam that counts deliveries; fp16, powersgd-2, … are torch's hooks. "
    "NAME:DENSITY has a density of its own, NAME@RATE a base rate.",
)
@click.option(
    "--values",
    callback=names,
    default="own",
    show_default=True,
    help="Codes of values, with commas; own: the recipe's own code.",
)
@click.option("--seeds", type=str, callback=count, default=3, show_default=True, help="Runs of each.")
@click.option(
    "--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the first run; then + 1, …"
)
@run_options
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results.  [default: runs/compare-…]")
def compare(**options: Any) -> None:  # fmt: skip
    """Train WORKLOAD with several recipes, from the same start on the same data, and compare.

    All runs of a seed take turns on the same workers, so that they meet the same conditions.
    """
    around = {name: options.pop(name) for name in AROUND}
    from gradsieve.lab.train.choice import DENSE, parse_choices

    plan = plan_of(options, recipe=DENSE, values="exact")
    choices = parse_choices(plan.choice, around["recipes"], around["values"])
    plan.check_with(choices)
    folder = run_folder(around["out"], f"compare-{plan.workload}")
    run_comparison(plan, choices, range(around["first_seed"], around["first_seed"] + around["seeds"]), folder, around)


def run_comparison(
    plan: Plan, choices: Sequence[Choice], seeds: Sequence[int], folder: Path, around: Row
) -> Row | None:
    """Run, show, write; the summary comes back, but on ranks other than 0 of a found world."""
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.train.comparison import compare_everywhere
    from gradsieve.lab.train.launch import launch
    from gradsieve.lab.train.world import found_world

    with termination_unwinds(), last_words(folder), _live(around["as_json"]) as see:
        results = launch(
            around["workers"], "cpu", folder, compare_everywhere, plan, choices, list(seeds),
            on_report=see, timeout=around["timeout"],
        )  # fmt: skip
    world = found_world()
    if world is not None and world.rank:
        return None
    content = write_comparison(plan, choices, list(seeds), folder, results)
    if around["as_json"]:
        click.echo(json.dumps({**content, "folder": str(folder)}))
    else:
        stdout().print(summary_table(content))
        stdout().print(f"Results: {folder}/comparison.png and {folder}/summary.json", soft_wrap=True)
    unequal = [name for name, row in content["summary"].items() if not row["replicas_equal"]]
    if unequal:
        raise MismatchError(f"workers ended with different parameters: {', '.join(unequal)}")
    return content


def write_comparison(
    plan: Plan, choices: Sequence[Choice], seeds: list[int], folder: Path, results: Sequence[Row]
) -> Row:
    """summary.json, table.txt and the figure."""
    from gradsieve.lab.plots.comparison import draw_comparison
    from gradsieve.lab.train.comparison import read_curves, run_name, summary
    from gradsieve.lab.train.journal import finite, read_config

    config = read_config(folder / run_name(choices[0], seeds[0]))
    environment = json.loads((folder / run_name(choices[0], seeds[0]) / "environment.json").read_text())
    content: Row = finite({
        "environment": environment,
        "settings": {**plan.to_json(), **{name: config[name] for name in SETTINGS}},
        "summary": summary(results),
        "runs": list(results),
    })  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    from rich.console import Console

    with (folder / "table.txt").open("w") as file:
        Console(file=file, width=160).print(summary_table(content))
    train, test = (read_curves(folder, choices, seeds, event) for event in ("train", "test"))
    draw_comparison(folder / "comparison.png", _title(content), train, test, config["metrics"][0], _evaluated(content))
    return content


SETTINGS = ("workers", "parameters", "train_samples", "test_samples", "total_steps", "batch", "metrics", "threads")


def summary_table(content: Row) -> Table:
    """Mean and spread over seeds."""
    from rich import box
    from rich.table import Table

    shown = Table(title=_title(content), title_justify="left", box=box.SIMPLE_HEAD)
    metrics = content["settings"]["metrics"]
    shown.add_column("recipe", no_wrap=True, style="bold")
    titles = [
        *(f"{_evaluated(content)} {name.replace('_', ' ')}" for name in metrics),
        "train loss",
        "step",
        "of it exchange",
        "MB a step",
    ]
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    for name, row in content["summary"].items():
        cells = [_spread(row["scores"].get(metric), "{:.4f}") for metric in metrics]
        cells += [_spread(row["train_loss"], "{:.4f}"), _spread(row["step_seconds"], "{:.1f} ms", 1e3)]
        cells += [_spread(row["exchange_seconds"], "{:.1f} ms", 1e3)]
        cells += [_spread(row["bytes_received_per_step"], "{:.4g}", 1e-6)]
        shown.add_row(name + (f" ({row['diverged']} diverged)" if row["diverged"] else ""), *cells)
    return shown


def _title(content: Row) -> str:
    settings, seeds = content["settings"], len(next(iter(content["summary"].values()))["seeds"])
    density = settings["exchange"]["density"]
    return (
        f"{settings['workload']}, {settings['parameters']:,} parameters, {settings['workers']} workers, "
        f"{settings['total_steps']:,} steps, {seeds} seed{'s' if seeds > 1 else ''}, "
        f"density {density if density is not None else 'of the preset'}"
    )


def _evaluated(content: Row) -> str:
    part: str = content["settings"].get("evaluate", "test")
    return part


def _spread(value: Row | None, form: str, scale: float = 1.0) -> str:
    if value is None or value["mean"] is None:
        return "-"
    text = form.format(value["mean"] * scale)
    return text if len(value["values"]) < 2 else f"{text} ± {value['deviation'] * scale:.2g}"


@contextmanager
def _live(as_json: bool) -> Iterator[Callable[[Row], None]]:
    """A table that fills up on a terminal; a line a test elsewhere; nothing with --json."""
    console = stderr()
    if as_json:
        yield lambda row: None
        return
    console.print("Starting workers; the first steps also compile kernels …", style="dim")
    if not console.is_terminal:
        yield lambda row: _line(row)
        return
    from rich.live import Live

    rows: dict[tuple[str, int], Row] = {}
    with Live(console=console, refresh_per_second=4) as live:

        def see(row: Row) -> None:
            known = rows.setdefault((row["label"], row["seed"]), {})
            if row["event"] in ("start", "train"):
                known.update(row)
            elif row["event"] == "test":
                known["scores"] = _scores(row)
            live.update(_live_table(rows))

        yield see


def _live_table(rows: dict[tuple[str, int], Row]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD)
    for title in ("recipe", "seed", "step", "loss", "test", "step time", "MB a step"):
        shown.add_column(title, justify="left" if title in ("recipe", "test") else "right", no_wrap=True)
    for (label, seed), row in rows.items():
        if "loss" in row:
            times = f"{row['step_seconds'] * 1e3:.0f} ms", f"{row['step_bytes'] / 1e6:.3g}"
            loss = f"{row['loss']:.3f}"
        else:
            times, loss = ("", ""), ""
        shown.add_row(label, str(seed), f"{row['step']}/{row['total_steps']}", loss, row.get("scores", ""), *times)
    return shown


def _scores(row: Row) -> str:
    from gradsieve.cli.progress import first_score

    return first_score(row)


def _line(row: Row) -> None:
    if row["event"] == "test":
        click.echo(f"{row['label']:<20} seed {row['seed']}  step {row['step']:>6}  {_scores(row)}", err=True)
