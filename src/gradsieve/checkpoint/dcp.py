"""Reads the states of all ranks from a folder of `torch.distributed.checkpoint`, for a run of another size.

A run of the same size does not need this: a sieve can be given to `dcp.save` and `dcp.load` as it is, since its state
has the rank in its keys. `dcp.load` reads the keys of the present ranks only. Those of all former ranks are read here.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from gradsieve.errors import InputError

RANK_KEY = re.compile(r"rank \d+ of \d+")


def read_states(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the states of all ranks that were saved to a folder, for `Sieve.load_state_dict`.

    Ranks call it independently.

    Args:
        folder: A folder that `torch.distributed.checkpoint` has written.

    Returns:
        The states by rank, such as "rank 0 of 4".

    Raises:
        InputError: The folder has no state of a sieve.
    """
    # Imported here: it takes a second, and most runs never need it.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(folder).read_metadata()
    flat: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for name, path in (metadata.planner_data or {}).items():
        depth = next((d for d, key in enumerate(path) if RANK_KEY.fullmatch(str(key))), None)
        if depth is not None and name in metadata.state_dict_metadata:
            stored = metadata.state_dict_metadata[name]
            flat[name] = None
            if isinstance(stored, TensorStorageMetadata):
                flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            paths[name] = tuple(path[depth:])
    if not flat:
        raise InputError(f"no sieve was saved to {os.fspath(folder)}: none of its keys is like 'rank 0 of 4'")
    load(flat, storage_reader=FileSystemReader(folder), no_dist=True)
    states: dict[str, Any] = {}
    for name, path in paths.items():
        _put(states, path, flat[name])
    return states


def _put(states: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    inner = states
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
