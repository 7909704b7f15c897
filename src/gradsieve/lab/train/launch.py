"""Starting a run: in local rank processes, or as one rank of the world that a launcher has created.

Local ranks are started by `rank_processes`, not by torch's elastic launcher, which would restart a script.
`rank_processes` reports progress through a pipe, names the failure that caused the others, and ends all processes on
Ctrl-C. The output of a rank process goes to `logs/rank-<r>.log`, so that it does not disturb the progress display.
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
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS, RankProcess, run_rank_processes
from gradsieve.lab.train.world import World, found_world, joined

LAST_LINES = 12
DEFAULT_RANKS = 4

Tell = Callable[[Any], None]
Work = Callable[..., Any]
"""A module-level function `work(tell, device, folder, *arguments)`, run on every rank inside a process group."""


def world_size(workers: int | None, world: World | None) -> int:
    """The number of ranks: that of the launcher's world, or `workers`."""
    if world is None:
        return workers or DEFAULT_RANKS
    if workers is not None and workers != world.size:
        raise InputError(
            f"{world.launcher} has started {world.size} processes, but --workers is {workers}: leave out --workers"
        )
    return world.size


def launch(
    workers: int | None, device: str, folder: Path, work: Work, *arguments: Any, on_report: Tell, timeout: float | None
) -> Any:
    """Run `work` on all ranks. Returns the result of rank 0, or of this rank if a launcher started it."""
    world, seconds = found_world(), timeout or TIMEOUT_SECONDS
    size = world_size(workers, world)
    if world is not None:
        with joined(world, device, seconds):
            return work(on_report if world.rank == 0 else _ignore, device, _of_rank_0(folder), *arguments)
    if device != "cpu":
        raise InputError(f"local ranks run on the CPU: start under torchrun to use {device}")
    return run_rank_processes(size, _local, folder, work, arguments, on_report=on_report, timeout_seconds=seconds)[0]


def last_lines(folder: Path, rank: int) -> list[str]:
    """The last lines of a rank process's output."""
    try:
        lines = log_file(folder, rank).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-LAST_LINES:]


def log_file(folder: Path, rank: int) -> Path:
    """The file with a rank process's output."""
    return folder / "logs" / f"rank-{rank}.log"


def print_to_log(folder: Path, rank: int) -> None:
    """Redirect stdout and stderr of this rank process to its log file."""
    path = log_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()


def _local(process: RankProcess, folder: Path, work: Work, arguments: tuple[Any, ...]) -> Any:
    print_to_log(folder, process.rank)
    try:
        return work(process.report, "cpu", folder, *arguments)
    except Exception as error:
        if not isinstance(error, GradsieveError):
            traceback.print_exc()
        raise


def _of_rank_0(folder: Path) -> Path:
    """Rank 0's folder: its name contains the time, which may differ between ranks."""
    import torch.distributed as dist

    shared = [str(folder)]
    dist.broadcast_object_list(shared, 0)
    return Path(shared[0])


def _ignore(report: Any) -> None:
    """Reports of ranks other than 0 are dropped."""
