"""Comparisons: runs that take turns, and what is made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gradsieve.cli import main
from gradsieve.cli.comparison_tables import summary_table
from gradsieve.lab.plots.comparison import draw_comparison
from gradsieve.lab.train.comparison import Curves, summary

SMALL = ["resnet20", "--workers", "2", "--batch", "4", "--train-samples", "64", "--test-samples", "40", "--steps", "4"]


def test_runs_in_turn_are_the_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipes", "dense,oktopk,randomk-nofeedback", "--values", "exact,bf16", "--seeds", "2"]
    assert main(["compare", *SMALL, *options, "--density", "0.05", "--out", str(tmp_path / "both"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    labels = ["dense", "oktopk", "oktopk bf16", "randomk-nofeedback", "randomk-nofeedback bf16"]
    assert list(content["summary"]) == labels
    assert [(run["recipe"], run["seed"]) for run in content["runs"]] == [(name, s) for s in (0, 1) for name in labels]
    written = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert written["summary"] == content["summary"]
    assert (tmp_path / "both" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "oktopk bf16" in (tmp_path / "both" / "table.txt").read_text()
    dense, sparse = (content["summary"][name] for name in ("dense", "oktopk"))
    assert dense["replicas_equal"] is sparse["replicas_equal"] is True
    assert sparse["bytes_received_per_step"]["mean"] < dense["bytes_received_per_step"]["mean"] / 4
    by_run = {(run["recipe"], run["seed"]): run["digest"] for run in content["runs"]}
    assert len(set(by_run.values())) == len(by_run)
    alone = ["--recipe", "oktopk", "--density", "0.05", "--seed", "1", "--out", str(tmp_path / "alone"), "--json"]
    assert main(["train", *SMALL, *alone]) == 0
    assert json.loads((tmp_path / "alone" / "result.json").read_text())["digest"] == by_run["oktopk", 1]


def finished(recipe: str, seed: int, accuracy: float, diverged: bool = False) -> dict[str, object]:
    return {
        "recipe": recipe, "seed": seed, "diverged": diverged, "replicas_equal": True,
        "train_loss": math.nan if diverged else 1.0, "scores": {} if diverged else {"accuracy": accuracy},
        "step_seconds": 0.1, "phase_seconds": {"exchange": 0.05}, "bytes_received_per_step": 1e6,
    }  # fmt: skip


def test_means_and_spread_leave_out_what_diverged() -> None:
    results = [finished("oktopk", 0, 0.8), finished("oktopk", 1, 0.9), finished("oktopk", 2, 0.0, diverged=True)]
    row = summary(results)["oktopk"]
    assert row["diverged"] == 1
    assert row["scores"]["accuracy"]["mean"] == pytest.approx(0.85)
    assert row["scores"]["accuracy"]["deviation"] == pytest.approx(math.sqrt(0.005))
    assert row["train_loss"]["values"] == [1.0, 1.0]
    lost = summary([finished("randomk", 0, 0.0, diverged=True)])
    settings = {
        "metrics": ["accuracy"], "workload": "w", "parameters": 1, "workers": 2, "total_steps": 3,
        "exchange": {"density": None},
    }  # fmt: skip
    assert summary_table({"settings": settings, "summary": lost}).row_count == 1


@pytest.mark.filterwarnings("error")
def test_a_run_that_broke_off_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    row = {"step": 1, "seconds": 1.0, "bytes_received": 10, "loss": 2.0, "accuracy": 0.5}
    curves = [Curves("dense", [[row, {**row, "step": 2}]]), Curves("randomk", [[row, {**row, "loss": None}]])]
    assert curves[1].at("loss") == [[2.0]]
    draw_comparison(
        tmp_path / "a.png", "title", curves, [Curves("dense", [[row]]), Curves("randomk", [[]])], "accuracy"
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_unknown_recipes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "resnet20", "--recipes", "dense,oktop"]) == 2
    assert "unknown recipe 'oktop'; did you mean 'oktopk'?" in capsys.readouterr().err
