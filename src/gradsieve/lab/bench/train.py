"""Training itself as a race: the time of a step, and the time until a loss is reached, on a network.

All exchanges train the same model on the same batches, in turns on the same ranks, and learning rates and the number of
steps are the workload's for all of them. The target is the loss on the test data that dense DDP ends at, a little
more, since runs differ by chance; whoever has not reached it by its last step has no time. Tests are outside the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.picture import draw_race
from gradsieve.lab.bench.report import Column, Report, Row, environment, megabytes, milliseconds, thousands, times
from gradsieve.lab.bench.site import LOOPBACK, check_networks, run_on
from gradsieve.lab.train.comparison import compare_everywhere, run_name
from gradsieve.lab.train.exchange import DENSE, Exchange
from gradsieve.lab.train.journal import METRICS, read_rows
from gradsieve.lab.train.launch import print_to_log
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.workers import Worker, threads_per_worker

TESTS = 40  # in a run: a time to a target is known to 1/40 of it

COLUMNS = (
    Column("recipe", "recipe"),
    Column("values", "values"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("seconds", "step", milliseconds),
    Column("speedup_over_dense", "dense /", times),
    Column("diverged", "diverged"),
    Column("test_loss", "test loss", lambda value: f"{value:.4f}"),
    Column("test_loss_deviation", "±", lambda value: f"{value:.2g}"),
    Column("seconds_to_target", "to the target", lambda value: f"{value:.1f} s"),
    Column("speedup_to_target", "dense /", times),
    Column("interface_bytes_received_per_rank", "by interface", megabytes),
)


@dataclass(frozen=True)
class TrainPlan:
    """What to race."""

    run: Plan
    exchanges: Sequence[Exchange]
    seeds: Sequence[int]
    networks: Sequence[str]
    ranks: int
    margin: float = 0.03  # of the loss dense ends at, that a target lies above it

    def __post_init__(self) -> None:
        if not any(exchange.recipe == DENSE for exchange in self.exchanges):
            raise InputError("dense has to be among the recipes: the target is what it reaches")
        if self.ranks < 2:
            raise InputError(f"ranks must be at least 2, or nothing is sent, got {self.ranks}")
        if not 0 <= self.margin < 1:
            raise InputError(f"margin must be in [0, 1), got {self.margin}")


def bench_train(plan: TrainPlan, folder: Path, progress: Progress = silent) -> Report:
    """All networks, one after the other; the runs themselves are kept in the folder."""
    check_networks(plan.networks, plan.ranks)
    rows: list[Row] = []
    for network in plan.networks:
        place = folder / network
        results = run_on(
            network, plan.ranks, train, plan, place, network != LOOPBACK, on_report=_in_steps(plan, network, progress)
        )[0]  # fmt: skip
        rows += _rows(plan, network, place, results)
    report = Report(environment(), rows)
    (folder / "race.json").write_text(report.to_json() + "\n")
    draw_race(folder / "race.png", rows)
    return report


def train(worker: Worker, plan: TrainPlan, folder: Path, in_network: bool) -> list[Row]:
    """One rank's part."""
    print_to_log(folder, worker.rank)
    return compare_everywhere(worker.report, "cpu", folder, plan.run, plan.exchanges, plan.seeds, in_network)


def _in_steps(plan: TrainPlan, network: str, progress: Progress) -> Callable[[Any], None]:
    """What a course tells, as progress of the whole race."""
    done: dict[tuple[str, int], int] = {}
    totals: list[int] = []

    def see(row: Row) -> None:
        if row["event"] == "start":
            totals.append(row["total_steps"])
        if row["event"] == "train":
            done[row["label"], row["seed"]] = row["step"]
            progress(network, sum(done.values()), len(plan.exchanges) * len(plan.seeds) * totals[0])

    return see


def _rows(plan: TrainPlan, network: str, folder: Path, results: Sequence[Row]) -> list[Row]:
    curves = {
        exchange: [_tests(folder / run_name(exchange, seed)) for seed in plan.seeds] for exchange in plan.exchanges
    }
    dense = next(exchange for exchange in plan.exchanges if exchange.recipe == DENSE)
    if any(result["diverged"] for result in results if result["recipe"] == dense.label):
        raise InputError(f"dense went astray, so there is no target: lower --lr (its runs are in {folder})")
    metric = _loss_of(curves[dense][0])
    target = (1 + plan.margin) * statistics.fmean(tests[-1][metric] for tests in curves[dense])
    reference = _measured(dense, results, curves[dense], metric, target)
    rows: list[Row] = []
    for exchange in plan.exchanges:
        measured = _measured(exchange, results, curves[exchange], metric, target)
        if "seconds_to_target" in measured and "seconds_to_target" in reference:
            measured["speedup_to_target"] = reference["seconds_to_target"] / measured["seconds_to_target"]
        rows.append({
            "recipe": exchange.recipe,
            "values": exchange.values,
            "peer": exchange.peer is not None,
            "workload": plan.run.workload,
            "network": network,
            "density": exchange.density,
            "ranks": plan.ranks,
            "threads": threads_per_worker(plan.ranks),
            "seeds": list(plan.seeds),
            "target_loss": target,
            "speedup_over_dense": reference["seconds"] / measured["seconds"],
            **measured,
        })  # fmt: skip
    return rows


def _measured(
    exchange: Exchange, results: Sequence[Row], tests: Sequence[Sequence[Row]], metric: str, target: float
) -> Row:
    """One exchange over all seeds."""
    own = [result for result in results if result["recipe"] == exchange.label]
    losses = [rows[-1][metric] for rows, result in zip(tests, own, strict=True) if not result["diverged"]]
    reached = [_seconds_to(rows, metric, target) for rows in tests]
    known = [seconds for seconds in reached if seconds is not None]
    interface = [result["interface_bytes_per_step"] for result in own if result["interface_bytes_per_step"] is not None]
    row: Row = {
        "numel": own[0]["parameters"],
        "repeats": own[0]["steps"],
        "seconds": statistics.median(result["step_seconds"] for result in own),
        "exchange_seconds": statistics.median(result["phase_seconds"]["exchange"] for result in own),
        "bytes_received_per_rank": statistics.fmean(result["bytes_received_per_step"] for result in own),
        "diverged": sum(result["diverged"] for result in own),
        "raw_seconds": [result["step_seconds"] for result in own],
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


def _tests(run: Path) -> list[Row]:
    return [row for row in read_rows(run / METRICS) if row["event"] == "test"]


def _loss_of(rows: Sequence[Row]) -> str:
    """What the workload calls its loss on the test data."""
    return next(name for name in rows[0] if name == "loss" or name.endswith("_loss"))


def _seconds_to(rows: Sequence[Row], metric: str, target: float) -> float | None:
    """Of training, until the first test at which the loss is there."""
    return next((float(row["seconds"]) for row in rows if row[metric] is not None and row[metric] <= target), None)
