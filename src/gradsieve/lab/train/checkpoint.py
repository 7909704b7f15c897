"""Checkpoints of a training run. They are atomic: a folder is renamed when every rank has written its part.

`checkpoints/step-00000100/` contains `shared.pt` (model, optimizer, sampler) and `rank-0.pt`, ... (the rank's sieve,
random state and recurrent state). All ranks must see the same folder. The newest two checkpoints are kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsieve.errors import GradsieveError, InputError

FOLDER = "checkpoints"
KEPT = 2


class CheckpointError(GradsieveError, RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are intact."""


class Saved(NamedTuple):
    """One rank's part of a checkpoint."""

    shared: dict[str, Any]
    own: dict[str, Any]


def save(run: Path, step: int, shared: Mapping[str, Any] | None, own: Mapping[str, Any]) -> Path:
    """Write a checkpoint. All ranks call it together, rank 0 with `shared`. Raises on all ranks if one cannot write."""
    target = run / FOLDER / _name(step)
    unfinished = target.with_name(f".{target.name}")
    rank = dist.get_rank()
    failures = [failure for failure in _gathered(_write_part(unfinished, rank, shared, own)) if failure]
    if rank == 0:
        if failures:
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
            for old in finished(run)[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    if failures:
        raise CheckpointError(f"{failures[0]}; {_latest(run)}")
    return target


def finished(run: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("step-*") if path.is_dir())


def load_latest(run: Path, rank: int, size: int) -> Saved:
    """This rank's part of the newest checkpoint."""
    found = finished(run)
    if not found:
        raise InputError(f"there is no checkpoint in {run / FOLDER}: only runs with --checkpoint-every can be resumed")
    parts = len(list(found[-1].glob("rank-*.pt")))
    if parts != size:
        raise InputError(f"{found[-1]} was saved by {parts} ranks, this run has {size}: resume with {parts}")
    try:
        shared, own = (
            torch.load(found[-1] / name, weights_only=True, map_location="cpu")
            for name in ("shared.pt", f"rank-{rank}.pt")
        )
    except (OSError, RuntimeError, EOFError) as error:
        raise InputError(f"rank {rank}: {found[-1]} cannot be read: {_first_line(error)}; remove it") from None
    return Saved(shared, own)


def _write_part(folder: Path, rank: int, shared: Mapping[str, Any] | None, own: Mapping[str, Any]) -> str:
    """Write this rank's part. Returns the error message, or an empty string."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"rank-{rank}.pt", own)
        if shared is not None:
            _write(folder / "shared.pt", shared)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        why = (error.strerror if isinstance(error, OSError) else None) or _first_line(error)
        return f"rank {rank}: cannot write the checkpoint {folder.parent / folder.name[1:]}: {why}"
    return ""


def _write(path: Path, state: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _gathered(sentence: str) -> list[str]:
    gathered: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, sentence)
    return gathered


def _latest(run: Path) -> str:
    found = finished(run)
    return f"the previous one, {found[-1]}, is intact" if found else "there is no earlier one"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
