"""Compiles the kernels before the first step: a step that takes seconds without a word looks like a deadlock.

Numba compiles a kernel when it is first called, and keeps it on disk. So a few steps of a tiny model are exchanged
between two threads. One process of a machine does this while the others wait, and these then read what it has compiled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradsieve.comm import Comm, CountingComm
from gradsieve.engine.engine import Engine, Settings
from gradsieve.engine.groups import Group, Slot
from gradsieve.engine.schedules import Constant
from gradsieve.engine.step import Step
from gradsieve.testing import run_ranks

try:
    import fcntl
except ImportError:  # Windows: each process compiles for itself
    fcntl = None  # type: ignore[assignment]

NUMEL, DENSITY = 4096, 0.02  # of the tiny model: enough entries for vector loops and their rests
STEPS = 3  # thresholds are predicted from the second step on, and adapted in the third
NAME = "weight"  # of its only parameter
RANKS = 2
TOLD_AFTER_SECONDS = 1.0  # reading compiled kernels from disk takes less

Rehearsal = Callable[[Comm, tuple[Group, ...], Settings], None]

_log = logging.getLogger("gradsieve")
_done: set[tuple[object, ...]] = set()  # what this process has compiled or read


def warm_up(groups: Sequence[Group], settings: Settings, rehearse: Rehearsal) -> None:
    """Call `rehearse` on two ranks, once per process for each recipe and dtype.

    Parts that are not this library's own are never called: they may count their calls.
    """
    for other in settings.others:
        warm_up(groups, replace(settings, recipe=other, others=()), rehearse)
    parts = settings.recipe.selector, settings.recipe.reducer, settings.recipe.feedback
    if not all(type(part).__module__.startswith("gradsieve.") for part in parts):
        return
    for dtype in {group.dtype for group in groups if group.sparse and group.device.type == "cpu"}:
        key = (dtype, repr(settings.recipe), settings.local_clip_norm is None, rehearse)
        if key not in _done:
            with _one_process_first(), _told_if_slow(), contextlib.suppress(Exception):  # the first step would tell
                _rehearse(rehearse, dtype, settings)
            _done.add(key)


def _rehearse(rehearse: Rehearsal, dtype: torch.dtype, settings: Settings) -> None:
    groups = (Group((Slot(NAME, 0, NUMEL),), dtype, torch.device("cpu"), sparse=True),)
    small = replace(settings, schedule=Constant(DENSITY), check_replicas_every=0)
    run_ranks(RANKS, lambda comm: rehearse(comm, groups, small))


@torch.no_grad()
def rehearse_gradients(comm: Comm, groups: tuple[Group, ...], settings: Settings) -> None:
    """Exchange some random gradients."""
    engine = Engine(groups, settings, CountingComm(comm))
    for number in range(STEPS):
        step = Step(engine)
        step.deliver(NAME, noise(number, comm.rank, groups[0].dtype))
        for index in step.ready():
            step.exchange(index)
        step.finish()


def noise(number: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Random entries for one step. The user's random numbers stay as they are."""
    source = torch.Generator().manual_seed(number * RANKS + rank)
    return torch.randn(NUMEL, generator=source, device="cpu", dtype=torch.float32).to(dtype)


@contextlib.contextmanager
def _one_process_first() -> Iterator[None]:
    """Let one process of this machine and user compile. The others wait until it is done, and then read together."""
    descriptor = _lock_file()
    if descriptor is None:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _lock_file() -> int | None:
    if fcntl is None:
        return None
    path = Path(tempfile.gettempdir()) / f"gradsieve-kernels-{os.getuid()}.lock"
    with contextlib.suppress(OSError):  # no folder to write to: each process compiles for itself
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return None


@contextlib.contextmanager
def _told_if_slow() -> Iterator[None]:
    text = "gradsieve: compiling kernels for this machine, which takes some seconds and happens once"
    timer = threading.Timer(TOLD_AFTER_SECONDS, _log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
