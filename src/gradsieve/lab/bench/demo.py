"""The demo: dense DDP, torch's bf16 hook and Gradsieve train the same model on slow links, against the clock.

All contestants start from the same model and take the same batches and the same number of steps. All of them run SGD
with momentum at the rate tuned for dense, except Ok-Topk, which has no momentum and a rate of its own. They share the
hosts, and the one with the least time on its own clock trains next. So all clocks show the same time until a contestant
has finished. Evaluations are on no clock.

Where no network can be built, the same runs train over loopback. The time on the links is then computed: the time of a
step over loopback, plus the time that the bytes of a rank take on its link. It is never called a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.errors import InputError
from gradsieve.lab.bench.report import Row, environment
from gradsieve.lab.bench.site import LOOPBACK, run_on
from gradsieve.lab.network.rate import Rate
from gradsieve.lab.network.topology import Topology
from gradsieve.lab.plots.demo import draw_demo
from gradsieve.lab.rank_processes import RankProcess, Tell
from gradsieve.lab.train.choice import DENSE, Choice
from gradsieve.lab.train.comparison import compare_everywhere, least_time_first, run_name
from gradsieve.lab.train.journal import METRICS, finite, read_config, read_rows
from gradsieve.lab.train.launch import print_to_log
from gradsieve.lab.train.plan import Plan

WORKLOAD = "mlp"
NETWORK_NAME = "demo"  # a benchmark on the same machine slows a demo down, but need not forbid it
EVALUATIONS = 16  # per run: the points of a line in the picture


class Contestant(NamedTuple):
    """A choice, and its name for a newcomer."""

    name: str
    choice: Choice


CONTESTANTS = (
    Contestant("dense DDP", Choice(DENSE)),
    Contestant("bf16 hook", Choice("bf16")),
    # Error feedback acts as momentum, so Ok-Topk runs without it. At the rate that dense's momentum amounts to, 3, it
    # diverges in so short a run. The rate 1 and the density were chosen on two seeds of the validation part.
    Contestant("Ok-Topk", Choice("oktopk-nomomentum", density=0.03, rate=1.0)),
    Contestant("one-bit updates", Choice("onebit-updates")),
)


@dataclass(frozen=True)
class Demo:
    """How long to train, and where."""

    hosts: int = 4
    steps: int = 32
    seed: int = 0
    rate: str = "100mbit"  # of every host's link
    obstacle: str | None = None  # why the ranks run over loopback instead; None: they run on a network

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise InputError(f"hosts must be at least 2, or there is nothing to exchange, got {self.hosts}")
        Topology.of(self.hosts, self.rate)
        if self.link.bits_per_second is None:
            raise InputError("the rate must be limited, such as 100mbit, or there is nothing to wait for")

    @property
    def link(self) -> Rate:
        """The rate of every host's link."""
        return Rate.parse(self.rate)

    @property
    def is_measured(self) -> bool:
        """Whether the ranks run on a network of that rate."""
        return self.obstacle is None

    @property
    def plan(self) -> Plan:
        """The settings that all runs share."""
        return Plan(
            WORKLOAD,
            CONTESTANTS[0].choice,
            steps=self.steps,
            seed=self.seed,
            log_every=1,
            evaluate_every=max(1, self.steps // EVALUATIONS),
        )

    @property
    def choices(self) -> list[Choice]:
        """The choices of the contestants, with their value codes."""
        return self.plan.checked(contestant.choice for contestant in CONTESTANTS)

    def names(self) -> dict[str, str]:
        """The contestants' names, by the label of their runs."""
        return {choice.label: known.name for choice, known in zip(self.choices, CONTESTANTS, strict=True)}


def run_demo(demo: Demo, folder: Path, tell: Tell) -> Row:
    """Train all contestants. Returns the content of demo.json, which the folder keeps beside demo.png and the runs."""
    network = demo.rate if demo.is_measured else LOOPBACK
    arguments = demo.hosts, train, demo, folder
    results: list[Row] = run_on(network, *arguments, on_report=tell, name=NETWORK_NAME)[0]
    folders = [folder / run_name(choice, demo.seed) for choice in demo.choices]
    rows = standings(demo, results, [_tests(path) for path in folders])
    facts = read_config(folders[0])
    content: Row = finite({
        "environment": environment(),
        "demo": {**asdict(demo), "is_measured": demo.is_measured},
        "model": {name: facts[name] for name in ("parameters", "train_samples", "test_samples", "batch", "optimizer")},
        "results": rows,
        "picture": str(folder / "demo.png"),
        "folder": str(folder),
    })  # fmt: skip
    draw_demo(folder / "demo.png", content)
    (folder / "demo.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def train(process: RankProcess, demo: Demo, folder: Path) -> list[Row]:
    """One rank's part. Returns the results of all runs."""
    print_to_log(folder, process.rank)
    plan, choices, seeds = demo.plan, demo.choices, [demo.seed]
    return compare_everywhere(
        process.report, "cpu", folder, plan, choices, seeds, in_network=demo.is_measured, turns=least_time_first
    )


def standings(demo: Demo, results: Sequence[Row], tests: Sequence[Sequence[Row]]) -> list[Row]:
    """One row per contestant, dense first. `seconds` are those on the links, whether measured or computed."""
    rows = [_row(demo, *each) for each in zip(CONTESTANTS, results, tests, strict=True)]
    for row in rows:
        row["times_sooner"] = rows[0]["seconds"] / row["seconds"]
        row["times_fewer_bytes"] = rows[0]["bytes_received"] / row["bytes_received"]
    return rows


def _row(demo: Demo, contestant: Contestant, result: Row, tests: Sequence[Row]) -> Row:
    steps = max(1, result["steps"])
    link_seconds = _link_seconds(demo, result)
    counted = result["interface_bytes_per_step"] if demo.is_measured else result["bytes_received_per_step"]
    return {
        "name": contestant.name,
        "recipe": result["recipe"],
        "accuracy": result["scores"].get("accuracy"),
        "train_loss": result["train_loss"],
        "steps": result["steps"],
        "diverged": result["diverged"],
        "replicas_equal": result["replicas_equal"],
        "is_measured": demo.is_measured,
        "seconds_per_step": result["step_seconds"] + link_seconds,
        "seconds": (result["step_seconds"] + link_seconds) * steps,
        "loopback_seconds_per_step": None if demo.is_measured else result["step_seconds"],
        "bytes_received": counted * steps,
        "curve": [[row["step"], row["seconds"] + link_seconds * row["step"], row["accuracy"]] for row in tests],
    }


def _link_seconds(demo: Demo, result: Row) -> float:
    """Seconds per step to add to those that were measured: none on a network."""
    bits = demo.link.bits_per_second
    assert bits is not None
    return 0.0 if demo.is_measured else float(8 * result["bytes_received_per_step"] / bits)


def _tests(run: Path) -> list[Any]:
    return [row for row in read_rows(run / METRICS) if row["event"] == "test"]
