"""Training as a race: time per step, and time until a target loss is reached, on each network.

All choices train the same model on the same batches, in turns on the same ranks. The number of steps is the same for
all of them, and so is the learning rate, except for choices with their own. The target is the final test loss of dense
DDP plus a margin, since runs differ at random. A choice that has not reached it by its last step has no time. Tests are
not timed.

On slow links dense takes hours. With `timed_steps` every choice trains once, over loopback, and only the time per step
is measured on each network (see `timed`). Runs of `gradsieve compare` need not be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.race import Leg, TrainPlan
from gradsieve.lab.bench.report import Report, Row, environment
from gradsieve.lab.bench.site import LOOPBACK, check_networks, run_on
from gradsieve.lab.bench.standings import Trained, standings
from gradsieve.lab.bench.timed import StepTime, read_times, require_equal
from gradsieve.lab.plots.race import draw_race
from gradsieve.lab.rank_processes import RankProcess
from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.comparison import compare_everywhere, run_name
from gradsieve.lab.train.journal import METRICS, RESULT, read_config, read_result, read_rows
from gradsieve.lab.train.launch import print_to_log
from gradsieve.lab.train.plan import Plan

TRAINED_ONCE = "course"  # subfolder of the runs over loopback, where only step times are measured on the networks

Found = Iterator[tuple[str, list[Trained]]]
"""Networks, and the runs of all choices on each."""

Folders = dict[tuple[Choice, int], Path]
"""Folders of runs, by choice and seed."""


def bench_train(plan: TrainPlan, folder: Path, progress: Progress = silent) -> Report:
    """Run the race on all networks, one after the other. The folder keeps the runs, race.json and race.png."""
    check_networks(plan.networks, plan.ranks)
    found = _trained_once(plan, folder, progress) if plan.timed_steps else _trained_on_each(plan, folder, progress)
    rows = [row for network, runs in found for row in standings(plan, network, runs)]
    report = Report(environment(), rows)
    (folder / "race.json").write_text(report.to_json() + "\n")
    draw_race(folder / "race.png", rows)
    return report


def _trained_on_each(plan: TrainPlan, folder: Path, progress: Progress) -> Found:
    for network in plan.networks:
        _train_on(network, plan.whole, folder / network, progress)
        yield network, _read(plan, _run_folders(plan, folder / network))


def _trained_once(plan: TrainPlan, folder: Path, progress: Progress) -> Found:
    assert plan.run.steps is not None
    if plan.compared:
        folders = {(choice, seed): compared_run(plan, choice, seed) for choice, seed in plan.runs()}
    else:
        _train_on(LOOPBACK, plan.whole, folder / TRAINED_ONCE, progress)
        folders = _run_folders(plan, folder / TRAINED_ONCE)
    trained = _read(plan, folders)
    first: list[Row] = []
    for network in plan.networks:
        own = [row for leg in plan.timed() for row in _train_on(network, leg, folder / network, progress)]
        first = first or own
        require_equal(network, own, plan.networks[0], first)
        times = read_times(folder / network, plan.choices, plan.dense, plan.seeds[0], plan.run.steps)
        yield network, [_with_time(runs, time) for runs, time in zip(trained, times, strict=True)]


def _train_on(network: str, leg: Leg, folder: Path, progress: Progress) -> list[Row]:
    see = _in_steps(leg, network, progress)
    results: list[Row] = run_on(network, leg.ranks, train, leg, folder, network != LOOPBACK, on_report=see)[0]
    return results


def _run_folders(plan: TrainPlan, folder: Path) -> Folders:
    return {(choice, seed): folder / run_name(choice, seed) for choice, seed in plan.runs()}


def _read(plan: TrainPlan, folders: Folders) -> list[Trained]:
    results = {run: read_result(folder) for run, folder in folders.items()}
    if any(results[plan.dense, seed]["diverged"] for seed in plan.seeds):
        raise InputError(
            f"dense diverged, so there is no target: lower --lr (its runs are in "
            f"{folders[plan.dense, plan.seeds[0]].parent})"
        )
    trained = []
    for choice in plan.choices:
        own = [results[choice, seed] for seed in plan.seeds]
        tests = [_tests(folders[choice, seed]) for seed in plan.seeds]
        trained.append(Trained(own, tests, [result["step_seconds"] for result in own]))
    return trained


def compared_run(plan: TrainPlan, choice: Choice, seed: int) -> Path:
    """The folder of a finished run with the same settings; an error if there is none."""
    wanted = replace(plan.run, choice=choice, seed=seed)
    for parent in plan.compared:
        folder = parent / run_name(choice, seed)
        if not (folder / RESULT).exists():
            continue
        config = read_config(folder)
        made = Plan.from_json(config["plan"])
        if replace(made, log_every=wanted.log_every, evaluate_every=wanted.evaluate_every) != wanted:
            raise InputError(f"{folder} was made with other settings than requested")
        if config["workers"] != plan.ranks:
            raise InputError(f"{folder} was made by {config['workers']} ranks, not {plan.ranks}")
        return folder
    raise InputError(f"no folder has a finished run of {choice.label} with seed {seed}")


def _with_time(runs: Trained, time: StepTime) -> Trained:
    pairs = [time.applied(*pair) for pair in zip(runs.results, runs.tests, strict=True)]
    return Trained([result for result, _ in pairs], [tests for _, tests in pairs], time.raw_seconds)


def train(process: RankProcess, leg: Leg, folder: Path, in_network: bool) -> list[Row]:
    """One rank's part of a leg. Returns the results of its runs."""
    print_to_log(folder, process.rank)
    return compare_everywhere(process.report, "cpu", folder, leg.run, leg.choices, leg.seeds, in_network)


def _in_steps(leg: Leg, network: str, progress: Progress) -> Callable[[Any], None]:
    """Turns the events of runs into progress of the whole leg, in steps."""
    done: dict[tuple[str, int], int] = {}
    totals: list[int] = []

    def see(row: Row) -> None:
        if row["event"] == "start":
            totals.append(row["total_steps"])
        if row["event"] == "train":
            done[row["label"], row["seed"]] = row["step"]
            progress(network, sum(done.values()), len(leg.choices) * len(leg.seeds) * totals[0])

    return see


def _tests(run: Path) -> list[Row]:
    return [row for row in read_rows(run / METRICS) if row["event"] == "test"]
