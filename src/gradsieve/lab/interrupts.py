"""Signals such as Ctrl-C while something must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def held_back(*signals: signal.Signals) -> Iterator[None]:
    """Delay these signals until the block ends. Processes started inside never receive them.

    Signals are blocked, not ignored: an ignored Ctrl-C would be lost. The system delivers a signal that this thread
    blocks to another thread, for instance one of torch's, and Python then runs the handler in this thread. So the
    handlers are replaced too: they only record the signal, which is raised again at the end.
    """
    noted: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    handlers = _replaced(signals, lambda signum, frame: noted.append(signum))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum in dict.fromkeys(noted):
            signal.raise_signal(signum)


def _replaced(signals: Sequence[signal.Signals], handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler and return the previous ones. Empty outside the main thread, which alone may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {each: signal.signal(each, handler) for each in signals if signal.getsignal(each) is not None}


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, a SIGTERM raises `SystemExit`, so that `finally` blocks clean up as they do after Ctrl-C."""

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
