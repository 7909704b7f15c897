"""Run several ranks in one process: for tests, simulation and a first look, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from gradsieve.comm import Comm, LocalComm, Room
from gradsieve.errors import InputError

T = TypeVar("T")


def run_ranks(size: int, fn: Callable[[Comm], T], *, timeout_seconds: float = 60.0) -> list[T]:
    """Run `fn(comm)` on `size` ranks, each a thread, and return the results in rank order.

    The first exception on any rank ends the run: the ranks that wait for it are released, and that exception is
    raised here with the rank's number in front. A rank that waits longer than the timeout for a peer is an error too.
    """
    if size < 1:
        raise InputError(f"size must be at least 1, got {size}")
    room = Room(size, timeout_seconds)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order they happened: the first is the cause

    def run(rank: int) -> None:
        try:
            results[rank] = fn(LocalComm(rank, room))
        except BaseException as error:
            failures.append((rank, error))
        finally:
            room.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise _with_rank(*failures[0])
    return [results[rank] for rank in range(size)]


def _with_rank(rank: int, error: BaseException) -> BaseException:
    """Say which rank it was, in the message itself where that is text."""
    named = f"rank {rank}"
    if error.args and isinstance(error.args[0], str):
        if not error.args[0].startswith(f"{named}:"):
            error.args = (f"{named}: {error.args[0]}", *error.args[1:])
    else:
        error.add_note(f"on {named}")
    return error
