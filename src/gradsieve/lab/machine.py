"""This machine: its processor, its cores and its free memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from gradsieve.errors import InputError

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def num_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, or its architecture if the name is unknown."""
    names = (line.partition(":")[2].strip() for line in _lines(CPUINFO) if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def available_bytes() -> int | None:
    """Memory that is available without swapping, or None if the system does not report it."""
    sizes = (line.split()[1] for line in _lines(MEMINFO) if line.startswith("MemAvailable:"))
    kilobytes = next(sizes, None)
    return None if kilobytes is None else int(kilobytes) * 1024


def require_memory(needed_bytes: int, remedy: str) -> None:
    """Refuse a run that does not fit: a machine out of memory kills processes without an error message."""
    free = available_bytes()
    if free is not None and needed_bytes > free:
        raise InputError(
            f"this needs about {needed_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are available: {remedy}"
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
