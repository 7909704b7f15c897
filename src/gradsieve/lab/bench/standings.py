"""The result of a race: time per step, final loss, time to the target loss, and the comparison with baselines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.lab.bench.race import TrainPlan
from gradsieve.lab.bench.report import Column, Row, milliseconds, thousands, times
from gradsieve.lab.rank_processes import threads_per_rank

COLUMNS = (
    Column("recipe", "recipe"),
    Column("values", "values"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("seconds", "step time", milliseconds),
    Column("speedup_over_dense", "speedup", times),
    Column("diverged", "diverged"),
    Column("test_loss", "test loss", lambda value: f"{value:.4f}"),
    Column("test_loss_deviation", "±", lambda value: f"{value:.2g}"),
    Column("seconds_to_target", "to target", lambda value: f"{value:.1f} s"),
    Column("speedup_to_target", "vs dense", times),
    Column("speedup_over_best_peer", "vs best baseline", times),
    Column("interface_bytes_received_per_rank", "MB per step", lambda value: f"{value / 1e6:.3g}"),
)


@dataclass(frozen=True)
class Trained:
    """All runs of one choice, one per seed: results, rows of tests, and times of steps."""

    results: list[Row]
    tests: list[list[Row]]
    raw_seconds: list[float]


def standings(plan: TrainPlan, network: str, trained: Sequence[Trained]) -> list[Row]:
    """One row per choice on this network."""
    runs_of = dict(zip(plan.choices, trained, strict=True))
    dense = runs_of[plan.dense]
    metric = _loss_of(dense.tests[0])
    target = (1 + plan.margin) * statistics.fmean(tests[-1][metric] for tests in dense.tests)
    reference = _measured(dense, metric, target)
    rows: list[Row] = []
    for choice, runs in runs_of.items():
        measured = _measured(runs, metric, target)
        if "seconds_to_target" in measured and "seconds_to_target" in reference:
            measured["speedup_to_target"] = reference["seconds_to_target"] / measured["seconds_to_target"]
        rows.append({
            "recipe": choice.name,
            "values": choice.values,
            "peer": choice.is_baseline,
            "workload": plan.run.workload,
            "network": network,
            "density": choice.density,
            "ranks": plan.ranks,
            "threads": threads_per_rank(plan.ranks),
            "seeds": list(plan.seeds),
            "target_loss": target,
            "timed_steps": plan.timed_steps,
            "speedup_over_dense": reference["seconds"] / measured["seconds"],
            **measured,
        })  # fmt: skip
    _compare_with_baselines(rows)
    return rows


def _compare_with_baselines(rows: Sequence[Row]) -> None:
    """Add the speedup to the target over the fastest baseline; dense is one of them."""
    baselines = [row for row in rows if row["peer"] and "seconds_to_target" in row]
    if not baselines:
        return
    best = min(baselines, key=lambda row: float(row["seconds_to_target"]))
    for row in rows:
        row["best_peer"] = best["recipe"]
        if "seconds_to_target" in row:
            row["speedup_over_best_peer"] = best["seconds_to_target"] / row["seconds_to_target"]


def _measured(runs: Trained, metric: str, target: float) -> Row:
    """The measurements of one choice over all seeds."""
    own, tests = runs.results, runs.tests
    losses = [rows[-1][metric] for rows, result in zip(tests, own, strict=True) if not result["diverged"]]
    reached = [seconds_to(rows, metric, target) for rows in tests]
    known = [seconds for seconds in reached if seconds is not None]
    interface = [result["interface_bytes_per_step"] for result in own if result["interface_bytes_per_step"] is not None]
    row: Row = {
        "numel": own[0]["parameters"],
        "repeats": own[0]["steps"],
        "seconds": statistics.median(result["step_seconds"] for result in own),
        "exchange_seconds": statistics.median(result["phase_seconds"]["exchange"] for result in own),
        "bytes_received_per_rank": statistics.fmean(result["bytes_received_per_step"] for result in own),
        "diverged": sum(result["diverged"] for result in own),
        "raw_seconds": runs.raw_seconds,
        "raw_seconds_to_target": reached,
        "curves": [[[row["step"], row["seconds"], row[metric]] for row in rows] for rows in tests],
    }
    if losses:
        row["test_loss"] = statistics.fmean(losses)
        row["test_loss_deviation"] = statistics.stdev(losses) if len(losses) > 1 else 0.0
    if len(known) == len(reached):
        row["seconds_to_target"] = statistics.fmean(known)
    if interface:
        row["interface_bytes_received_per_rank"] = statistics.fmean(interface)
    return row


def _loss_of(rows: Sequence[Row]) -> str:
    """The name of the workload's test loss: `loss` or, for example, `masked_loss`."""
    return next(name for name in rows[0] if name == "loss" or name.endswith("_loss"))


def seconds_to(rows: Sequence[Row], metric: str, target: float) -> float | None:
    """Training time until the first test whose loss is at most the target, or None."""
    return next((float(row["seconds"]) for row in rows if row[metric] is not None and row[metric] <= target), None)
