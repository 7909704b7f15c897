"""Signals that come at moments when they must wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from gradsieve.lab.interrupts import held_back


@pytest.fixture
def another_thread() -> Iterator[None]:
    """One that was there before anything was blocked, as those of torch and NumPy are."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


def interrupted_inside(after: list[str]) -> None:
    with held_back(signal.SIGINT):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # where Python would act upon it
            threading.Event().wait(1e-6)
        after.append("inside")
    after.append("outside")


@pytest.mark.usefixtures("another_thread")
def test_an_interrupt_that_another_thread_gets_waits_as_well() -> None:
    """It came in the middle of starting a worker, which then complained that its orders were cut off."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    after: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_inside(after)
    assert after == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_happens_where_nothing_came() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with held_back(signal.SIGINT, signal.SIGTERM):
        pass
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
