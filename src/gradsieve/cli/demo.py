"""`gradsieve demo`: a comparison that anybody can watch, in about two minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gradsieve.cli.compare import run_comparison
from gradsieve.cli.console import stdout
from gradsieve.cli.training import run_folder
from gradsieve.cli.values import count, density
from gradsieve.errors import InputError

WORKLOAD = "resnet20"
TESTS = 8
SLOW_BITS_PER_SECOND = 100e6


@click.command()
@click.option("--workers", type=str, callback=count, default=4, show_default=True, help="Local worker processes.")
@click.option("--steps", type=str, callback=count, default=400, show_default=True, help="Training steps of each run.")
@click.option("--density", type=str, callback=density, default=0.01, show_default=True, help="Share that is sent.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of model and batches.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results.  [default: runs/demo-<time>]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def demo(workers: int, steps: int, density: float, seed: int, out: Path | None, as_json: bool) -> None:
    """Train a small network on local workers, dense and with Ok-Topk, and compare.

    A small ResNet-20 learns to read handwritten digits (those of scikit-learn). Both runs start from the same model and
    see the same pictures; they take turns, so that they meet the same conditions. Ok-Topk trains without the momentum
    that dense has, at the rate that momentum comes to: error feedback brings its own. It is `gradsieve compare resnet20
    --recipes dense,oktopk-nomomentum` with one seed.
    """
    if workers < 2:
        raise InputError(f"workers must be at least 2, or there is nothing to exchange, got {workers}")
    folder = run_folder(out, "demo")
    from gradsieve.lab.train.choice import DENSE, Choice
    from gradsieve.lab.train.plan import Plan

    dense = Choice(DENSE, density)
    plan = Plan(WORKLOAD, dense, steps=steps, evaluate_every=max(1, steps // TESTS))
    around = {"workers": workers, "timeout": None, "as_json": as_json}
    content = run_comparison(plan, [dense, replace(dense, recipe="oktopk-nomomentum")], [seed], folder, around)
    if content is not None and not as_json:
        stdout().print(_on_a_network(content), soft_wrap=True)


def _on_a_network(content: dict[str, Any]) -> str:
    """Loopback hardly notices bytes; what they would cost elsewhere is arithmetic, and said to be."""
    dense, sparse = (
        row["bytes_received_per_step"]["mean"] * 8 / SLOW_BITS_PER_SECOND for row in content["summary"].values()
    )
    return (
        f"One machine is no slow network: at {SLOW_BITS_PER_SECOND / 1e6:.0f} Mbit/s these bytes alone would take "
        f"{dense * 1e3:.0f} ms a step dense, {sparse * 1e3:.0f} ms sparse (computed, not measured)."
    )
