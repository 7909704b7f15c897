"""Tests that run on real processes under DDP: `@on_ranks(4) def test_…(rank)` is called once in each of 4 ranks.

Starting processes costs more than most tests, so the tests of a file share them. A failure ends them, and the next test
starts new ones. The fixture `rank_pool` is in `tests/conftest.py`.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gradsieve.lab.rank_processes import RankProcess, run_rank_processes

OnRank = Callable[[int], None]


def on_ranks(size: int) -> Callable[[OnRank], Callable[[RankPool], None]]:
    """Run the decorated test in `size` processes of one group; each gets its rank."""

    def decorate(body: OnRank) -> Callable[[RankPool], None]:
        def test(rank_pool: RankPool) -> None:
            rank_pool.run(size, body.__module__, body.__name__)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


class RankPool:
    """Processes of one group that wait for the names of tests."""

    def __init__(self) -> None:
        self.size = 0
        self.senders: list[Connection] = []
        self.outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, size: int, module: str, name: str) -> None:
        if self.size != size:
            self.stop()
            self._start(size)
        size, self.size = self.size, 0  # after any failure, a timeout included, these processes are of no more use
        for sender in self.senders:
            sender.send((module, name))
        error = self.outcomes.get()
        if error is not None:
            raise error
        self.size = size

    def stop(self) -> None:
        """Without a name to wait for, processes end."""
        for sender in self.senders:
            sender.close()
        self.size, self.senders = 0, []

    def _start(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self.size, self.senders = size, [sender for _, sender in pipes]
        self.outcomes = queue.SimpleQueue()
        readers = [reader for reader, _ in pipes]
        threading.Thread(target=_watch, args=(size, readers, self.outcomes), daemon=True).start()


def _watch(size: int, readers: list[Connection], outcomes: queue.SimpleQueue[BaseException | None]) -> None:
    try:
        run_rank_processes(size, _serve, readers, on_report=lambda name: outcomes.put(None))
    except BaseException as error:
        outcomes.put(error)


def _serve(process: RankProcess, readers: list[Connection]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            module, name = readers[process.rank].recv()
        except EOFError:
            return
        _call(getattr(import_module(module), name).body, process.rank)
        dist.barrier()
        if process.rank == 0:
            process.report(name)


def _call(body: OnRank, rank: int) -> None:
    try:
        body(rank)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(place))
        raise AssertionError(f"{type(error).__name__}: {error} [{where}]") from error
