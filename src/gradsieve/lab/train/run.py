"""A run from its first step to its last, on one rank: train, log, test, probe, save. Rank 0 reports and writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve.lab.train import checkpoint
from gradsieve.lab.train.interval import PHASES, Interval
from gradsieve.lab.train.journal import PROBE, Journal, Row
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.train.replica import Replica
from gradsieve.lab.workloads import Task

REHEARSED_STEPS = 2

Tell = Callable[[Row], None]
"""Called with each event as it happens. Its kind is in `event`: start, train, test, probe, checkpoint or end."""


@dataclass
class Totals:
    """Totals since the first step, equal on all ranks. Times are means over ranks, bytes the maximum."""

    seconds: float = 0.0  # of training, without tests and checkpoints
    bytes_received: int = 0
    interface_bytes: int | None = None  # received by a host's interface, if every rank has its own host
    skipped_steps: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Run:
    """One run of one replica. All ranks create it together and call its methods together."""

    def __init__(
        self, plan: Plan, task: Task[Any], folder: Path, tell: Tell, device: str = "cpu", in_network: bool = False
    ) -> None:
        self.plan, self.task = plan, task
        self.replica = Replica(plan, task, device, in_network)
        self.pace = plan.pace(self.replica.total_steps)
        self.totals = Totals()
        self.scores: Row = {}
        self.losses: list[float] = []
        self.diverged = False
        self._journal = Journal(folder)
        self._tell = tell if self.replica.rank == 0 else None

    @property
    def done(self) -> bool:
        """Whether the run has ended: after its last step, or because it diverged."""
        return self.diverged or self.replica.step >= self.pace.total

    def begin(self, resume: bool = False) -> None:
        """Call it before the first step. With `resume`, continue from the last checkpoint."""
        facts = self._facts()
        if resume:
            self._load()
        if self._tell is not None:
            if resume:
                self._journal.go_on(self.plan, facts, self.replica.step)
            else:
                self._journal.begin(self.plan, facts)
        self._announce("start", {"folder": str(self._journal.folder), **facts}, write=False)

    def advance(self) -> None:
        """Train until the next log, test or checkpoint is due, and do it."""
        interval = self.replica.advance(self.pace.next_stop(self.replica.step) - self.replica.step)
        self._log(interval)
        self._note_probe()
        step = self.replica.step
        if self.diverged:
            return
        if self.pace.tests_at(step):
            self.scores = dict(self.replica.evaluate())
            self._announce("test", {**self.scores, **self._so_far()})
        if self.pace.saves_at(step):
            self._save()

    def end(self) -> Row:
        """Call it after the last step. Returns the result."""
        digests: list[Any] = [None] * self.replica.size
        dist.all_gather_object(digests, self.replica.digest())
        steps = max(1, self.replica.step)
        result = {
            "workload": self.plan.workload,
            "recipe": self.plan.choice.label,
            "seed": self.plan.seed,
            "parameters": self.replica.num_parameters,
            "steps": self.replica.step,
            "diverged": self.diverged,
            "train_loss": self.losses[-1] if self.losses else None,
            "evaluated": self.plan.evaluate,
            "scores": self.scores,
            "seconds": self.totals.seconds,
            "step_seconds": self.totals.seconds / steps,
            "phase_seconds": {name: seconds / steps for name, seconds in self.totals.phases.items()},
            "bytes_received_per_step": self.totals.bytes_received / steps,
            "interface_bytes_per_step": _per_step(self.totals.interface_bytes, steps),
            "skipped_steps": self.totals.skipped_steps,
            "replicas_equal": len(set(digests)) == 1,
            "digest": digests[0],
        }
        self.replica.close()
        if self._tell is not None:
            self._journal.end(result)
        self._announce("end", result, write=False)
        return result

    def _facts(self) -> Row:
        """Facts for config.json that follow from the plan and the data."""
        replica, choice = self.replica, self.plan.choice
        return {
            "workers": replica.size,
            "parameters": replica.num_parameters,
            "train_samples": len(self.task.train),
            "test_samples": len(self.task.test),
            "total_steps": self.pace.total,
            "steps_per_epoch": replica.steps_per_epoch,
            "batch": replica.preset.batch,
            "optimizer": repr(choice.optimizer(replica.preset)),
            "recipe": choice.ddp_baseline.description if choice.ddp_baseline else repr(choice.build(replica.preset)),
            "density": None if choice.ddp_baseline else repr(replica.schedule),
            "metrics": [metric.name for metric in self.task.metrics],
            "threads": torch.get_num_threads(),
        }

    def _log(self, interval: Interval) -> None:
        sums, most = _gathered(interval)
        size, steps = self.replica.size, interval.steps
        mean = {name: value / size / steps for name, value in zip(("loss", *PHASES), sums, strict=False)}
        self.totals.seconds += sum(mean[name] for name in PHASES) * steps
        self.totals.bytes_received += most[0]
        if interval.interface_bytes is not None:
            self.totals.interface_bytes = (self.totals.interface_bytes or 0) + most[1]
        self.totals.skipped_steps += interval.skipped
        for name in PHASES:
            self.totals.phases[name] += mean[name] * steps
        self.losses.append(mean["loss"])
        self.diverged = not math.isfinite(mean["loss"])
        row = {
            "loss": mean["loss"],
            "rate": self.replica.rate_of(self.replica.step - 1),
            **{f"{name}_seconds": mean[name] for name in PHASES},
            "step_seconds": sum(mean[name] for name in PHASES),
            "step_bytes": most[0] / steps,
            "selected": interval.selected / steps,
            "delivered": interval.delivered / steps,
            **self._so_far(),
        }
        self._announce("train", row)

    def _so_far(self) -> Row:
        return {
            "seconds": self.totals.seconds,
            "bytes_received": self.totals.bytes_received,
            "interface_bytes": self.totals.interface_bytes,
            "skipped_steps": self.totals.skipped_steps,
        }

    def _note_probe(self) -> None:
        probe = self.replica.probe
        if probe is None:
            return
        for row in probe.taken():
            if self._tell is not None:
                self._journal.add(row, PROBE)
            self._announce("probe", {name: row[name] for name in ("xi", "contraction")}, write=False)

    def _announce(self, event: str, row: Row, write: bool = True) -> None:
        if self._tell is None:
            return
        whole = {"event": event, "step": self.replica.step, "epoch": self.replica.progress, **row}
        if write:
            self._journal.add(whole)
        self._tell({**whole, "label": self.plan.choice.label, "seed": self.plan.seed})

    def _save(self) -> None:
        replica = self.replica
        # Plain containers only: they are loaded with `weights_only`, which runs no code of the file.
        totals = {**vars(self.totals), "scores": self.scores, "losses": self.losses[-1:]}
        shared = {**replica.shared_state(), "totals": totals} if replica.rank == 0 else None
        path = checkpoint.save(self._journal.folder, replica.step, shared, replica.own_state())
        self._announce("checkpoint", {"path": str(path)}, write=False)

    def _load(self) -> None:
        saved = checkpoint.load_latest(self._journal.folder, self.replica.rank, self.replica.size)
        self.replica.load(saved.shared, saved.own)
        totals = dict(saved.shared["totals"])
        self.scores, self.losses = totals.pop("scores"), totals.pop("losses")
        self.totals = Totals(**totals)


def _gathered(interval: Interval) -> tuple[list[float], list[int]]:
    """Over all ranks: sums of loss and phases, maxima of bytes."""
    sums = torch.tensor([interval.loss, *interval.phases.values()], dtype=torch.float64)
    most = torch.tensor([interval.bytes_received, interval.interface_bytes or 0], dtype=torch.int64)
    dist.all_reduce(sums)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return sums.tolist(), most.tolist()


def _per_step(number: int | None, steps: int) -> float | None:
    return None if number is None else number / steps


def rehearse(plan: Plan, task: Task[Any], device: str) -> None:
    """Two steps of a discarded replica, to compile kernels and load parts of torch before anything is timed."""
    replica = Replica(plan, task, device)
    replica.advance(min(REHEARSED_STEPS, replica.total_steps))
    replica.close()


def train_everywhere(tell: Tell, device: str, folder: Path, plan: Plan, resume: bool) -> Row:
    """One run on this rank of an initialized process group. `launch` starts it on all ranks."""
    task = plan.open()
    rehearse(plan, task, device)
    run = Run(plan, task, folder, tell, device)
    run.begin(resume)
    while not run.done:
        run.advance()
    return run.end()
