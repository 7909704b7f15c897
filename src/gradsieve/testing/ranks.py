"""Runs several ranks in one process, without a network: for tests, simulations and examples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from gradsieve.comm import Comm, LocalComm, Room
from gradsieve.errors import InputError

T = TypeVar("T")


def run_ranks(size: int, fn: Callable[[Comm], T], *, timeout_seconds: float = 60.0) -> list[T]:
    """Run a function on several ranks, each a thread of this process.

    Args:
        size: The number of ranks.
        fn: Called on each rank with its `Comm`.
        timeout_seconds: How long a rank may wait for a peer.

    Returns:
        The results in rank order.

    Raises:
        InputError: `size` is below 1.
        PeerLostError: A rank waited too long.
        Exception: The first exception on any rank, with the rank in its text. The other ranks are released.

    Example:
        >>> import torch
        >>> from gradsieve.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.all_reduce(torch.tensor([1.0 + comm.rank])).item())
        [6.0, 6.0, 6.0]
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
    """Add the rank to the message of an error, or as a note if it has none."""
    named = f"rank {rank}"
    if error.args and isinstance(error.args[0], str):
        if not error.args[0].startswith(f"{named}:"):
            error.args = (f"{named}: {error.args[0]}", *error.args[1:])
    else:
        error.add_note(f"on {named}")
    return error
