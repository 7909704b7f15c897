"""`gradsieve demo`: dense DDP against Ok-Topk on local ranks, in about two minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from gradsieve.cli.comparison import Comparison, run_comparison
from gradsieve.cli.console import stdout
from gradsieve.cli.parsing import count_option, density_option, folder_option, parsed_into, seed_option
from gradsieve.cli.run_folder import create_run_folder
from gradsieve.errors import InputError

WORKLOAD = "resnet20"
SPARSE = "oktopk-nomomentum"
EVALUATIONS = 8  # per run
SLOW_BITS_PER_SECOND = 100e6


@dataclass(frozen=True)
class DemoOptions:
    """Parsed options of `gradsieve demo`."""

    workers: int
    steps: int
    density: float
    seed: int
    out: Path | None
    as_json: bool


@click.command()
@count_option("--workers", default=4, help="Local rank processes, at least 2.")
@count_option("--steps", default=400, help="Training steps per run.")
@density_option(default=0.01, help="Fraction of the entries that Ok-Topk sends.")
@seed_option("--seed", help="Seed for initialization and data order.")
@folder_option("--out", help="Folder for results.  [default: runs/demo-<time>]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@parsed_into(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Train a small network with dense DDP and with Ok-Topk.

    A small ResNet-20 learns to classify scikit-learn's handwritten digits on local ranks. Both runs start from the same
    model and use the same batches. They take turns, so that other load on the machine affects them equally. Ok-Topk
    runs with plain SGD at the learning rate that is equivalent to dense's momentum, because error feedback acts as
    momentum. This is `gradsieve compare resnet20 --recipes dense,oktopk-nomomentum` with one seed.
    """
    if options.workers < 2:
        raise InputError(f"workers must be at least 2, or there is nothing to exchange, got {options.workers}")
    folder = create_run_folder(options.out, "demo")
    from gradsieve.lab.train.choice import DENSE, Choice
    from gradsieve.lab.train.plan import Plan

    dense = Choice(DENSE, options.density)
    sparse = replace(dense, recipe=SPARSE)
    plan = Plan(WORKLOAD, dense, steps=options.steps, evaluate_every=max(1, options.steps // EVALUATIONS))
    content = run_comparison(
        Comparison(plan, [dense, sparse], [options.seed], folder, options.workers, None, options.as_json)
    )
    if content is not None and not options.as_json:
        stdout().print(_on_a_slow_network(content), soft_wrap=True)


def _on_a_slow_network(content: dict[str, Any]) -> str:
    """Loopback hides the cost of bytes, so it is computed for a slow link, and the sentence says so."""
    dense, sparse = (
        row["bytes_received_per_step"]["mean"] * 8 / SLOW_BITS_PER_SECOND for row in content["summary"].values()
    )
    return (
        f"This machine has no slow network: at {SLOW_BITS_PER_SECOND / 1e6:.0f} Mbit/s these bytes alone would take "
        f"{dense * 1e3:.0f} ms per step dense, {sparse * 1e3:.0f} ms per step sparse (computed, not measured)."
    )
