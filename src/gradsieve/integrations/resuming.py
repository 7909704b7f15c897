"""Each rank saves its state to a file of its own. Either all ranks resume, or none does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve.errors import InputError
from gradsieve.sieve import Sieve


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's state in a checkpoint's folder."""
    return Path(folder) / f"gradsieve-rank-{rank}.pt"


def save_in(folder: str | os.PathLike[str], sieve: Sieve) -> None:
    """Write this rank's state. It is renamed when complete, so that a file that exists is never truncated."""
    path = file_of(folder, sieve.engine.comm.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(sieve.state_dict(), unfinished)
    unfinished.replace(path)


def load_from(folder: str | os.PathLike[str], sieve: Sieve, group: dist.ProcessGroup | None) -> None:
    """Resume from the file that `save_in` wrote. All ranks call it together."""
    path = file_of(folder, sieve.engine.comm.rank)
    state = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
    load_together(sieve, state, group, f"the checkpoint {folder}")


def load_together(sieve: Sieve, state: Mapping[str, Any] | None, group: dist.ProcessGroup | None, source: str) -> None:
    """Resume from `state` if every rank has one, and start again if none has. Otherwise raise: ranks would differ."""
    size = sieve.engine.comm.size
    has_state: list[bool] = [False] * size
    dist.all_gather_object(has_state, state is not None, group=group)
    missing = [rank for rank in range(size) if not has_state[rank]]
    if state is not None and not missing:
        sieve.load_state_dict(state)
    elif len(missing) == size:
        warnings.warn(
            f"{source} has no state of gradsieve: training continues with residuals of zero, from the schedule's start",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        raise InputError(
            f"{source} has no state of gradsieve for ranks {', '.join(map(str, missing))} of {size}: "
            "every rank must see its own file; if any is lost, remove all to start with residuals of zero"
        )
