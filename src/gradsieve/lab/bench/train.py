"""Training itself as a race: the time of a step, and the time until a loss is reached, on a network.

All exchanges train the same model on the same batches, in turns on the same ranks. The number of steps is the same for
all of them, and so is the learning rate, but for those that were given one of their own. The target is the loss on the
test data that dense DDP ends at, a little more, since runs differ by chance; whoever has not reached it by its last
step has no time. Tests are outside the time.

Where links are slow dense takes hours. With `timed_steps` all train once, on loopback, and on every network only the
time of a step is taken (see `timed`). Runs that `gradsieve compare` has made need not be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.picture import draw_race
from gradsieve.lab.bench.race import Leg, TrainPlan
from gradsieve.lab.bench.report import Report, Row, environment
from gradsieve.lab.bench.site import LOOPBACK, check_networks, run_on
from gradsieve.lab.bench.standings import Trained, standings
from gradsieve.lab.bench.timed import StepTime, read_times, require_equal
from gradsieve.lab.train.comparison import compare_everywhere, run_name
from gradsieve.lab.train.exchange import Exchange
from gradsieve.lab.train.journal import METRICS, RESULT, read_config, read_result, read_rows
from gradsieve.lab.train.launch import print_to_log
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.workers import Worker


def bench_train(plan: TrainPlan, folder: Path, progress: Progress = silent) -> Report:
    """All networks, one after the other; the runs themselves are kept in the folder."""
    check_networks(plan.networks, plan.ranks)
    found = _trained_once(plan, folder, progress) if plan.timed_steps else _trained_on_each(plan, folder, progress)
    rows = [row for network, runs in found for row in standings(plan, network, runs)]
    report = Report(environment(), rows)
    (folder / "race.json").write_text(report.to_json() + "\n")
    draw_race(folder / "race.png", rows)
    return report


Found = Iterator[tuple[str, list[Trained]]]
"""Networks, and the runs of all exchanges on each."""


def _trained_on_each(plan: TrainPlan, folder: Path, progress: Progress) -> Found:
    for network in plan.networks:
        _train_on(network, plan.whole, folder / network, progress)
        yield network, _read(plan, _places(plan, folder / network))


def _trained_once(plan: TrainPlan, folder: Path, progress: Progress) -> Found:
    assert plan.run.steps is not None
    if plan.compared:
        places = {(exchange, seed): compared_run(plan, exchange, seed) for exchange, seed in plan.runs()}
    else:
        _train_on(LOOPBACK, plan.whole, folder / "course", progress)
        places = _places(plan, folder / "course")
    course = _read(plan, places)
    first: list[Row] = []
    for network in plan.networks:
        own = [row for leg in plan.timed() for row in _train_on(network, leg, folder / network, progress)]
        first = first or own
        require_equal(network, own, plan.networks[0], first)
        times = read_times(folder / network, plan.exchanges, plan.dense, plan.seeds[0], plan.run.steps)
        yield network, [_on_time(runs, time) for runs, time in zip(course, times, strict=True)]


def _train_on(network: str, leg: Leg, folder: Path, progress: Progress) -> list[Row]:
    see = _in_steps(leg, network, progress)
    results: list[Row] = run_on(network, leg.ranks, train, leg, folder, network != LOOPBACK, on_report=see)[0]
    return results


Places = dict[tuple[Exchange, int], Path]
"""Folders of runs, by exchange and seed."""


def _places(plan: TrainPlan, folder: Path) -> Places:
    return {(exchange, seed): folder / run_name(exchange, seed) for exchange, seed in plan.runs()}


def _read(plan: TrainPlan, places: Places) -> list[Trained]:
    results = {run: read_result(place) for run, place in places.items()}
    if any(results[plan.dense, seed]["diverged"] for seed in plan.seeds):
        raise InputError(
            f"dense went astray, so there is no target: lower --lr (its runs are in "
            f"{places[plan.dense, plan.seeds[0]].parent})"
        )
    trained = []
    for exchange in plan.exchanges:
        own = [results[exchange, seed] for seed in plan.seeds]
        tests = [_tests(places[exchange, seed]) for seed in plan.seeds]
        trained.append(Trained(own, tests, [result["step_seconds"] for result in own]))
    return trained


def compared_run(plan: TrainPlan, exchange: Exchange, seed: int) -> Path:
    """The folder of a run that was made with the same settings; or one sentence about what is missing."""
    wanted = replace(plan.run, exchange=exchange, seed=seed)
    for folder in plan.compared:
        place = folder / run_name(exchange, seed)
        if not (place / RESULT).exists():
            continue
        config = read_config(place)
        made = Plan.from_json(config["plan"])
        if replace(made, log_every=wanted.log_every, evaluate_every=wanted.evaluate_every) != wanted:
            raise InputError(f"{place} was made with other settings than are asked for")
        if config["workers"] != plan.ranks:
            raise InputError(f"{place} was made by {config['workers']} ranks, not {plan.ranks}")
        return place
    raise InputError(f"no folder has a finished run of {exchange.label} with seed {seed}")


def _on_time(runs: Trained, time: StepTime) -> Trained:
    pairs = [time.applied(*pair) for pair in zip(runs.results, runs.tests, strict=True)]
    return Trained([result for result, _ in pairs], [tests for _, tests in pairs], time.raw_seconds)


def train(worker: Worker, leg: Leg, folder: Path, in_network: bool) -> list[Row]:
    """One rank's part."""
    print_to_log(folder, worker.rank)
    return compare_everywhere(worker.report, "cpu", folder, leg.run, leg.exchanges, leg.seeds, in_network)


def _in_steps(leg: Leg, network: str, progress: Progress) -> Callable[[Any], None]:
    """What a course tells, as progress of the whole race."""
    done: dict[tuple[str, int], int] = {}
    totals: list[int] = []

    def see(row: Row) -> None:
        if row["event"] == "start":
            totals.append(row["total_steps"])
        if row["event"] == "train":
            done[row["label"], row["seed"]] = row["step"]
            progress(network, sum(done.values()), len(leg.exchanges) * len(leg.seeds) * totals[0])

    return see


def _tests(run: Path) -> list[Row]:
    return [row for row in read_rows(run / METRICS) if row["event"] == "test"]
