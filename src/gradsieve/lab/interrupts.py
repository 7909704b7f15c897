"""Ctrl-C and its like at moments when they must wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def held_back(*signals: signal.Signals) -> Iterator[None]:
    """A signal meanwhile arrives afterwards; processes started meanwhile never hear it.

    Blocked, not ignored: an ignored Ctrl-C would be lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """A SIGTERM leaves by way of `finally`, as Ctrl-C does, so that what was set up is taken down."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
