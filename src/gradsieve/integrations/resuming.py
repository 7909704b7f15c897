"""Every rank's state as a file of its own, and going on from it together or not at all."""

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
    """Where a rank's state lies in a checkpoint's folder."""
    return Path(folder) / f"gradsieve-rank-{rank}.pt"


def save_in(folder: str | os.PathLike[str], sieve: Sieve) -> None:
    """Write this rank's state. A file that is there is whole: it is renamed when it is."""
    path = file_of(folder, sieve.engine.comm.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(sieve.state_dict(), unfinished)
    unfinished.replace(path)


def load_from(folder: str | os.PathLike[str], sieve: Sieve, group: dist.ProcessGroup | None) -> None:
    """Go on from what `save_in` wrote there. All ranks call it together."""
    path = file_of(folder, sieve.engine.comm.rank)
    state = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
    load_together(sieve, state, group, f"the checkpoint {folder}")


def load_together(sieve: Sieve, state: Mapping[str, Any] | None, group: dist.ProcessGroup | None, source: str) -> None:
    """Go on from `state` if every rank has one, begin anew if none has; anything else would part the ranks' ways."""
    size = sieve.engine.comm.size
    has_state: list[bool] = [False] * size
    dist.all_gather_object(has_state, state is not None, group=group)
    missing = [rank for rank in range(size) if not has_state[rank]]
    if state is not None and not missing:
        sieve.load_state_dict(state)
    elif len(missing) == size:
        warnings.warn(
            f"{source} has no state of gradsieve: training goes on with nothing owed, from the schedule's beginning",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        raise InputError(
            f"{source} has no state of gradsieve for ranks {', '.join(map(str, missing))} of {size}: "
            "every rank must see its own file; if they are lost, remove the others' too to begin with nothing owed"
        )
