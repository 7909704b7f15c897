"""Starting a run: on local workers of its own, or as one rank of the world that was found.

Local workers come from `lab.workers`, not from torch's elastic launcher: it hears of progress through a pipe, tells the
failure that others only follow from, and ends all workers on Ctrl-C; the elastic launcher would restart a script.
What a worker prints goes to `logs/rank-<r>.log`, so that it neither tears up the progress display nor is lost.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradsieve.errors import GradsieveError, InputError
from gradsieve.lab.train.world import World, found_world, joined
from gradsieve.lab.workers import TIMEOUT_SECONDS, Worker, run_workers

LAST_LINES = 12
DEFAULT_WORKERS = 4

Told = Callable[[Any], None]
Work = Callable[..., Any]
"""A module-level function `work(tell, device, folder, *arguments)`, run on every rank inside a process group."""


def world_size(workers: int | None, world: World | None) -> int:
    """How many ranks there will be."""
    if world is None:
        return workers or DEFAULT_WORKERS
    if workers is not None and workers != world.size:
        raise InputError(
            f"{world.launcher} has started {world.size} processes, but --workers is {workers}: leave it out"
        )
    return world.size


def launch(
    workers: int | None, device: str, folder: Path, work: Work, *arguments: Any, on_report: Told, timeout: float | None
) -> Any:
    """Run `work` on all ranks; what it gives on rank 0, and on other ranks of a found world what it gives there."""
    world, seconds = found_world(), timeout or TIMEOUT_SECONDS
    size = world_size(workers, world)
    if world is not None:
        with joined(world, device, seconds):
            return work(on_report if world.rank == 0 else _nobody, device, _that_of_first(folder), *arguments)
    if device != "cpu":
        raise InputError(f"local workers run on the CPU: start under torchrun to use {device}")
    return run_workers(size, _local, folder, work, arguments, on_report=on_report, timeout_seconds=seconds)[0]


def last_lines(folder: Path, rank: int) -> list[str]:
    """What a local worker printed last."""
    try:
        lines = log_file(folder, rank).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-LAST_LINES:]


def log_file(folder: Path, rank: int) -> Path:
    """Where a local worker's output goes."""
    return folder / "logs" / f"rank-{rank}.log"


def print_to_log(folder: Path, rank: int) -> None:
    """From now on, what this worker prints goes to its log."""
    path = log_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()


def _local(worker: Worker, folder: Path, work: Work, arguments: tuple[Any, ...]) -> Any:
    print_to_log(folder, worker.rank)
    try:
        return work(worker.report, "cpu", folder, *arguments)
    except Exception as error:
        if not isinstance(error, GradsieveError):
            traceback.print_exc()
        raise


def _that_of_first(folder: Path) -> Path:
    """Rank 0's: a name with the time in it may differ from rank to rank."""
    import torch.distributed as dist

    told = [str(folder)]
    dist.broadcast_object_list(told, 0)
    return Path(told[0])


def _nobody(report: Any) -> None:
    """Only rank 0 tells."""
