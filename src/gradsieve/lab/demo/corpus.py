"""Bytes of Python: the standard library's own sources, which every machine has."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.errors import InputError

SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
HELD_OUT_ONE_IN = 10
MIN_BYTES = 1_000_000


class Batch(NamedTuple):
    """Contexts of bytes, and the byte that follows each."""

    contexts: Tensor
    targets: Tensor


class Corpus(NamedTuple):
    """Whole files are held out, so that nothing that is tested was seen."""

    train: Tensor
    held_out: Tensor


def read_corpus(root: Path | None = None) -> Corpus:
    """All modules in a fixed order; a file's name decides on which side it is."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in _sources(folder):
        name = path.relative_to(folder).as_posix()
        is_held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
        parts[is_held_out].append(path.read_bytes())
    train, held_out = (bytearray(b"".join(files)) for files in parts)
    if len(train) < MIN_BYTES or not held_out:
        raise InputError(
            f"the demo trains on the sources of Python's standard library, but {folder} has only "
            f"{len(train) + len(held_out)} bytes of them: use a Python with its library as plain files"
        )
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


def _sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".py"))


def shard(data: Tensor, rank: int, size: int) -> Tensor:
    """One rank's equal, contiguous share."""
    return data[len(data) * rank // size : len(data) * (rank + 1) // size]


def draw(data: Tensor, context: int, count: int, generator: torch.Generator) -> Batch:
    """Windows at random places."""
    starts = torch.randint(len(data) - context, (count,), generator=generator)
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, -1])
