"""Training itself as a race: the time of a step, and the time until a loss is reached, on a network.

All exchanges train the same model on the same batches, in turns on the same ranks. The number of steps is the same for
all of them, and so is the learning rate, but for those that were given one of their own. The target is the loss on the
test data that dense DDP ends at, a little more, since runs differ by chance; whoever has not reached it by its last
step has no time. Tests are outside the time.

Where links are slow dense takes hours. With `timed_steps` all train once, on loopback, and on every network only the
time of a step is taken (see `timed`). Runs that `gradsieve compare` has made need not be made again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.errors import InputError
from gradsieve.lab.bench.contest import Progress, silent
from gradsieve.lab.bench.picture import draw_race
from gradsieve.lab.bench.report import Column, Report, Row, environment, megabytes, milliseconds, thousands, times
from gradsieve.lab.bench.site import LOOPBACK, check_networks, run_on
from gradsieve.lab.bench.timed import StepTime, by_local_steps, read_times, require_equal, timed_exchange, timed_plan
from gradsieve.lab.train.comparison import compare_everywhere, run_name
from gradsieve.lab.train.exchange import DENSE, Exchange
from gradsieve.lab.train.journal import METRICS, RESULT, read_config, read_result, read_rows
from gradsieve.lab.train.launch import print_to_log
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.workers import Worker, threads_per_worker

TESTS = 40  # in a run, unless asked for otherwise: a time to a target is known to 1/40 of it

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
    Column("speedup_over_best_peer", "best peer /", times),
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
    timed_steps: int | None = None  # on each network, where the loss is trained on loopback; None trains on each
    compared: Sequence[Path] = ()  # folders of comparisons that have the runs already; none trains them

    def __post_init__(self) -> None:
        if not any(exchange.recipe == DENSE for exchange in self.exchanges):
            raise InputError("dense has to be among the recipes: the target is what it reaches")
        self.run.check_with(self.exchanges)
        if self.ranks < 2:
            raise InputError(f"ranks must be at least 2, or nothing is sent, got {self.ranks}")
        if not 0 <= self.margin < 1:
            raise InputError(f"margin must be in [0, 1), got {self.margin}")
        if self.compared and self.timed_steps is None:
            raise InputError("runs of a comparison have no times on networks: give --timed-steps too")
        if self.timed_steps is not None:
            if self.timed_steps < 1:
                raise InputError(f"timed steps must be at least 1, got {self.timed_steps}")
            if self.run.steps is None:
                raise InputError("timed steps need the number of steps of a run, not of epochs")
            if any(each.density is None for each in self.exchanges) and self.run.resolved().sieve.warmup:
                raise InputError(
                    "timed steps need --density: with the preset's warm-up no step takes as long as others"
                )

    @property
    def dense(self) -> Exchange:
        """Whose loss is the target."""
        return next(exchange for exchange in self.exchanges if exchange.recipe == DENSE)

    @property
    def whole(self) -> Leg:
        """All of it."""
        return Leg(self.run, self.exchanges, self.seeds, self.ranks)

    def runs(self) -> Iterator[tuple[Exchange, int]]:
        """Every exchange with every seed."""
        return ((exchange, seed) for exchange in self.exchanges for seed in self.seeds)

    def timed(self) -> list[Leg]:
        """A few steps of each exchange, in groups whose stretches of steps are equally long."""
        assert self.timed_steps is not None
        exchanges = list(dict.fromkeys(timed_exchange(exchange) for exchange in self.exchanges))
        return [
            Leg(timed_plan(self.run, self.timed_steps, local_steps), group, self.seeds[:1], self.ranks)
            for local_steps, group in by_local_steps(exchanges).items()
        ]


class Leg(NamedTuple):
    """What a network trains: some exchanges in turns."""

    run: Plan
    exchanges: Sequence[Exchange]
    seeds: Sequence[int]
    ranks: int


@dataclass(frozen=True)
class Trained:
    """One exchange's runs, one a seed: what each came to, its tests, and the times of steps."""

    results: list[Row]
    tests: list[list[Row]]
    raw_seconds: list[float]


def bench_train(plan: TrainPlan, folder: Path, progress: Progress = silent) -> Report:
    """All networks, one after the other; the runs themselves are kept in the folder."""
    check_networks(plan.networks, plan.ranks)
    found = _trained_once(plan, folder, progress) if plan.timed_steps else _trained_on_each(plan, folder, progress)
    rows = [row for network, runs in found for row in _rows(plan, network, runs)]
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


def _rows(plan: TrainPlan, network: str, trained: Sequence[Trained]) -> list[Row]:
    runs_of = dict(zip(plan.exchanges, trained, strict=True))
    dense = runs_of[plan.dense]
    metric = _loss_of(dense.tests[0])
    target = (1 + plan.margin) * statistics.fmean(tests[-1][metric] for tests in dense.tests)
    reference = _measured(dense, metric, target)
    rows: list[Row] = []
    for exchange, runs in runs_of.items():
        measured = _measured(runs, metric, target)
        if "seconds_to_target" in measured and "seconds_to_target" in reference:
            measured["speedup_to_target"] = reference["seconds_to_target"] / measured["seconds_to_target"]
        rows.append({
            "recipe": exchange.name,
            "values": exchange.values,
            "peer": exchange.is_baseline,
            "workload": plan.run.workload,
            "network": network,
            "density": exchange.density,
            "ranks": plan.ranks,
            "threads": threads_per_worker(plan.ranks),
            "seeds": list(plan.seeds),
            "target_loss": target,
            "timed_steps": plan.timed_steps,
            "speedup_over_dense": reference["seconds"] / measured["seconds"],
            **measured,
        })  # fmt: skip
    _compare_with_peers(rows)
    return rows


def _compare_with_peers(rows: Sequence[Row]) -> None:
    """How much sooner than the first of the baselines, dense among them, a recipe was there."""
    peers = [row for row in rows if row["peer"] and "seconds_to_target" in row]
    if not peers:
        return
    best = min(peers, key=lambda row: float(row["seconds_to_target"]))
    for row in rows:
        row["best_peer"] = best["recipe"]
        if "seconds_to_target" in row:
            row["speedup_over_best_peer"] = best["seconds_to_target"] / row["seconds_to_target"]


def _measured(runs: Trained, metric: str, target: float) -> Row:
    """One exchange over all seeds."""
    own, tests = runs.results, runs.tests
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


def _tests(run: Path) -> list[Row]:
    return [row for row in read_rows(run / METRICS) if row["event"] == "test"]


def _loss_of(rows: Sequence[Row]) -> str:
    """What the workload calls its loss on the test data."""
    return next(name for name in rows[0] if name == "loss" or name.endswith("_loss"))


def _seconds_to(rows: Sequence[Row], metric: str, target: float) -> float | None:
    """Of training, until the first test at which the loss is there."""
    return next((float(row["seconds"]) for row in rows if row[metric] is not None and row[metric] <= target), None)
