"""Running a comparison, for `gradsieve compare` and `gradsieve demo`: launch, show, write the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.comparison_tables import evaluated_part, live_table, summary_table, title
from gradsieve.cli.console import STARTING, stderr, stdout
from gradsieve.cli.run_folder import log_shown_on_failure
from gradsieve.cli.train_progress import first_score
from gradsieve.errors import MismatchError

if TYPE_CHECKING:
    from gradsieve.lab.train.choice import Choice
    from gradsieve.lab.train.plan import Plan

Row = dict[str, Any]
SETTINGS = ("workers", "parameters", "train_samples", "test_samples", "total_steps", "batch", "metrics", "threads")


@dataclass(frozen=True)
class Comparison:
    """What to compare, on how many ranks, and where the results go."""

    plan: Plan  # all settings except exchange and seed
    choices: Sequence[Choice]
    seeds: Sequence[int]
    folder: Path
    workers: int | None  # None for the default
    timeout: float | None  # seconds to wait for another rank; None for the default
    as_json: bool


def run_comparison(comparison: Comparison) -> Row | None:
    """Run, show and write the comparison.

    Returns the content of summary.json. Under a launcher, ranks other than 0 return None.

    Raises:
        MismatchError: The replicas of a run ended with different parameters.
    """
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.train.comparison import compare_everywhere
    from gradsieve.lab.train.launch import launch
    from gradsieve.lab.train.world import found_world

    folder = comparison.folder
    with termination_unwinds(), log_shown_on_failure(folder), _live(comparison.as_json) as see:
        results = launch(
            comparison.workers, "cpu", folder, compare_everywhere,
            comparison.plan, comparison.choices, list(comparison.seeds),
            on_report=see, timeout=comparison.timeout,
        )  # fmt: skip
    world = found_world()
    if world is not None and world.rank:
        return None
    content = _write(comparison, results)
    if comparison.as_json:
        click.echo(json.dumps({**content, "folder": str(folder)}))
    else:
        stdout().print(summary_table(content))
        stdout().print(f"Results: {folder}/comparison.png and {folder}/summary.json", soft_wrap=True)
    unequal = [name for name, row in content["summary"].items() if not row["replicas_equal"]]
    if unequal:
        raise MismatchError(f"the ranks ended with different parameters: {', '.join(unequal)}")
    return content


def _write(comparison: Comparison, results: Sequence[Row]) -> Row:
    """Write summary.json, table.txt and comparison.png. Returns the content of summary.json."""
    from rich.console import Console

    from gradsieve.lab.plots.comparison import draw_comparison
    from gradsieve.lab.train.comparison import read_curves, run_name, summary
    from gradsieve.lab.train.journal import finite, read_config

    folder, choices, seeds = comparison.folder, comparison.choices, comparison.seeds
    first_run = folder / run_name(choices[0], seeds[0])
    config = read_config(first_run)
    content: Row = finite({
        "environment": json.loads((first_run / "environment.json").read_text()),
        "settings": {**comparison.plan.to_json(), **{name: config[name] for name in SETTINGS}},
        "summary": summary(results),
        "runs": list(results),
    })  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    with (folder / "table.txt").open("w") as file:
        Console(file=file, width=160).print(summary_table(content))
    train, test = (read_curves(folder, choices, seeds, event) for event in ("train", "test"))
    metric = config["metrics"][0]
    draw_comparison(folder / "comparison.png", title(content), train, test, metric, evaluated_part(content))
    return content


@contextmanager
def _live(as_json: bool) -> Iterator[Callable[[Row], None]]:
    """Show events on stderr: a live table on a terminal, else one line per evaluation, nothing with --json."""
    console = stderr()
    if as_json:
        yield lambda row: None
        return
    console.print(STARTING, style="dim")
    if not console.is_terminal:
        yield _print_evaluation
        return
    from rich.live import Live

    rows: dict[tuple[str, int], Row] = {}
    with Live(console=console, refresh_per_second=4) as live:

        def see(row: Row) -> None:
            known = rows.setdefault((row["label"], row["seed"]), {})
            if row["event"] in ("start", "train"):
                known.update(row)
            elif row["event"] == "test":
                known["scores"] = first_score(row)
            live.update(live_table(rows))

        yield see


def _print_evaluation(row: Row) -> None:
    if row["event"] == "test":
        click.echo(f"{row['label']:<20} seed {row['seed']}  step {row['step']:>6}  {first_score(row)}", err=True)
