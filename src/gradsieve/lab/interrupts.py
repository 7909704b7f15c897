"""Ctrl-C and its like at moments when they must wait."""

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
    """A signal meanwhile arrives afterwards; processes started meanwhile never hear it.

    Blocked, not ignored: an ignored Ctrl-C would be lost. What is blocked in this thread the system gives to another
    one that torch or NumPy has started, and Python hands it back to this one: so it is also noted, not acted upon.
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
    """What handled them before; nothing where Python does not, or this thread may not ask."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {each: signal.signal(each, handler) for each in signals if signal.getsignal(each) is not None}


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
