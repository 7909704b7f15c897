"""The demo itself: dense and Ok-Topk, step by step in turn, from the same start, on the same workers and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from gradsieve.comm import TorchComm
from gradsieve.lab.bench.report import environment
from gradsieve.lab.demo.corpus import draw, read_corpus, shard
from gradsieve.lab.demo.model import CONTEXT, seeded_model
from gradsieve.lab.demo.replica import DENSE, Exchange, Replica, Score, Step
from gradsieve.lab.workers import TIMEOUT_SECONDS, Worker, run_workers, threads_per_worker

SPARSE = "oktopk"
RUNS = (DENSE, SPARSE)
MAX_DENSE_STEPS = 5
CHECKPOINTS = 15
HELD_OUT_BYTES = 8192  # the same at each checkpoint, all ranks together


@dataclass(frozen=True)
class DemoPlan:
    """What is trained, and how."""

    workers: int
    steps: int
    density: float
    seed: int
    batch_per_worker: int = 64

    @property
    def dense_steps(self) -> int:
        """With which the sparse run starts: a new model's gradients change too fast to be held back."""
        return min(MAX_DENSE_STEPS, self.steps // 10)

    @property
    def checkpoints(self) -> list[int]:
        """Numbers of the steps after which held-out bytes are scored; the last always."""
        return sorted({self.steps * part // CHECKPOINTS for part in range(1, CHECKPOINTS + 1)} - {0})


class Trained(NamedTuple):
    """One run on one rank."""

    steps: list[Step]
    scores: dict[int, Score]
    digest: str


class Tick(NamedTuple):
    """How far a run is, told while it goes on; loss and times are those of rank 0."""

    run: str
    step: int
    loss: float
    seconds: float
    bytes_received: int  # so far


@dataclass(frozen=True)
class Run:
    """One run over all ranks: means of losses, maxima of times and bytes."""

    recipe: str
    train_loss: list[float]
    step_seconds: list[float]
    exchange_seconds: list[float]
    bytes_received: list[int]  # in each step
    held_out_steps: list[int]
    held_out_loss: list[float]  # nats a byte
    held_out_accuracy: list[float]  # of the next byte
    replicas_equal: bool
    digest: str

    @property
    def summary(self) -> dict[str, Any]:
        """What the table shows."""
        return {
            "held_out_loss": self.held_out_loss[-1],
            "held_out_accuracy": self.held_out_accuracy[-1],
            "bytes_received_per_step": statistics.mean(self.bytes_received),
            "bytes_received_ordinary_step": statistics.median(self.bytes_received),
            "step_seconds": statistics.median(self.step_seconds),
            "exchange_seconds": statistics.median(self.exchange_seconds),
            "replicas_equal": self.replicas_equal,
        }


@dataclass(frozen=True)
class Comparison:
    """Both runs and what they were made under."""

    plan: DemoPlan
    environment: dict[str, Any]
    num_parameters: int
    runs: dict[str, Run]

    @property
    def unequal(self) -> list[str]:
        """Runs whose workers ended with different parameters; there must be none."""
        return [name for name, run in self.runs.items() if not run.replicas_equal]

    def to_json(self) -> dict[str, Any]:
        """All that was measured."""
        settings = {
            **asdict(self.plan),
            "dense_steps": self.plan.dense_steps,
            "parameters": self.num_parameters,
            "threads": threads_per_worker(self.plan.workers),
        }
        return {
            "environment": self.environment,
            "settings": settings,
            "summary": {name: run.summary for name, run in self.runs.items()},
            "runs": {name: asdict(run) for name, run in self.runs.items()},
        }


def compare(plan: DemoPlan, on_tick: Callable[[Tick], None] = lambda tick: None) -> Comparison:
    """Train both ways on local workers."""
    ranks: list[dict[str, Trained]] = run_workers(plan.workers, train, plan, on_report=on_tick)
    runs = {name: _joined(name, [rank[name] for rank in ranks]) for name in RUNS}
    num_parameters = sum(parameter.numel() for parameter in seeded_model(plan.seed).parameters())
    return Comparison(plan, environment(), num_parameters, runs)


def train(worker: Worker, plan: DemoPlan) -> dict[str, Trained]:
    """One worker's part."""
    corpus = read_corpus()
    mine = shard(corpus.train, worker.rank, worker.size)
    chance = torch.Generator().manual_seed(plan.seed * 1_000_003 + worker.rank)
    tested = torch.Generator().manual_seed(worker.rank)
    held_out = draw(corpus.held_out, CONTEXT, -(-HELD_OUT_BYTES // worker.size), tested)
    comm = TorchComm(timeout_seconds=TIMEOUT_SECONDS)
    exchanges = (Exchange(DENSE, 1.0, 0), Exchange(SPARSE, plan.density, plan.dense_steps))
    replicas = {e.recipe: Replica(seeded_model(plan.seed), e, plan.steps, comm) for e in exchanges}
    steps: dict[str, list[Step]] = {name: [] for name in replicas}
    scores: dict[str, dict[int, Score]] = {name: {} for name in replicas}
    for number in range(1, plan.steps + 1):
        batch = draw(mine, CONTEXT, plan.batch_per_worker, chance)
        for name, replica in replicas.items():
            steps[name].append(replica.step(batch))
            if worker.rank == 0:
                worker.report(_tick(name, steps[name]))
        if number in plan.checkpoints:
            for name, replica in replicas.items():
                scores[name][number] = replica.score(held_out)
    return {name: Trained(steps[name], scores[name], replicas[name].digest()) for name in replicas}


def _tick(name: str, steps: Sequence[Step]) -> Tick:
    last = steps[-1]
    return Tick(name, len(steps), last.loss, last.seconds, sum(step.bytes_received for step in steps))


def _joined(name: str, ranks: Sequence[Trained]) -> Run:
    by_step = list(zip(*(rank.steps for rank in ranks), strict=True))
    checkpoints = list(ranks[0].scores)
    totals = [[sum(parts) for parts in zip(*(r.scores[n] for r in ranks), strict=True)] for n in checkpoints]
    return Run(
        recipe=name,
        train_loss=[statistics.fmean(step.loss for step in steps) for steps in by_step],
        step_seconds=[max(step.seconds for step in steps) for steps in by_step],
        exchange_seconds=[max(step.exchange_seconds for step in steps) for steps in by_step],
        bytes_received=[max(step.bytes_received for step in steps) for steps in by_step],
        held_out_steps=checkpoints,
        held_out_loss=[loss / count for loss, _, count in totals],
        held_out_accuracy=[right / count for _, right, count in totals],
        replicas_equal=len({rank.digest for rank in ranks}) == 1,
        digest=ranks[0].digest,
    )
