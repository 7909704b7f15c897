"""Local ranks: real processes on this machine that form a Gloo group, over loopback or where they are placed.

Processes are spawned, never forked: compiled kernels and torch's threads do not survive a fork. Each has a pipe to the
parent for progress, its result, or its failure. However a worker ends, the parent hears of it and ends the others;
however the parent ends, the workers end too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.errors import GradsieveError, InputError, PeerLostError
from gradsieve.lab.interrupts import held_back
from gradsieve.lab.machine import num_cores

TIMEOUT_SECONDS = 300.0
CAUSE_SECONDS = 2.0  # how long after a failure that only says "a peer is lost" the cause may take to arrive

Tell = Callable[[Any], None]
Work = Callable[..., Any]
"""A module-level function `work(worker, *arguments)`; arguments, result and reports must be picklable."""

Place = Callable[[int], str]
"""Called first in a rank's process: moves it to where that rank belongs; gives the interface it shall use."""


class WorkerError(GradsieveError, RuntimeError):
    """A worker failed; the sentence has its rank and its message."""

    def __init__(self, sentence: str, rank: int) -> None:
        super().__init__(sentence)
        self.rank = rank


@dataclass(frozen=True)
class Worker:
    """What a worker knows of itself, inside an initialized process group."""

    rank: int
    size: int
    report: Tell  # sends something to the parent while the work goes on


class Failure(NamedTuple):
    """What a worker says last."""

    rank: int
    sentence: str
    is_consequence: bool  # it lost a peer: that one's failure is the cause


class Message(NamedTuple):
    """What travels from a worker to the parent."""

    kind: str  # "report", "result" or "failure"
    content: Any


def threads_per_worker(size: int) -> int:
    """An equal share of the cores."""
    return max(1, num_cores() // size)


def on_loopback(rank: int) -> str:
    """The usual place: this machine, and an interface that nothing else hears."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def run_workers(
    size: int,
    work: Work,
    *arguments: Any,
    on_report: Tell | None = None,
    place: Place = on_loopback,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run `work(worker, *arguments)` on `size` processes; the results in rank order.

    The timeout is that of the process group: how long a rank waits for its peers. Raises `WorkerError` with the rank
    and message of the worker that failed first.
    """
    if size < 1:
        raise InputError(f"ranks must be at least 1, got {size}")
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as folder:
        post = _Post(size, str(Path(folder) / "store"), place, timeout_seconds)
        staff = _Staff(post, work, arguments)
        try:
            staff.start()
            return staff.results(on_report or (lambda content: None))
        finally:
            staff.dismiss()


class _Post(NamedTuple):
    """What all workers are told about where they stand."""

    size: int
    store: str
    place: Place
    timeout_seconds: float


class _Staff:
    """The processes and the parent's ends of their pipes."""

    def __init__(self, post: _Post, work: Work, arguments: tuple[Any, ...]) -> None:
        self.size = post.size
        self.seat = (post, work, arguments)
        self.processes: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        self.finished: dict[int, Any] = {}

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # or starting the first process would start it, and unblock
        with held_back(signal.SIGINT):
            for rank in range(self.size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_worker_main, args=(theirs, rank, *self.seat), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes[ours] = rank

    def results(self, on_report: Tell) -> list[Any]:
        while self.pipes:
            for pipe in wait(list(self.pipes)):
                assert isinstance(pipe, Connection)
                failure = self._heard(pipe, on_report)
                if failure is not None:
                    cause = self._cause(failure)
                    raise WorkerError(cause.sentence, cause.rank)
        return [self.finished[rank] for rank in range(self.size)]

    def dismiss(self) -> None:
        """End what still runs, politely first."""
        for process in self.processes:
            if len(self.finished) < self.size:
                process.terminate()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _heard(self, pipe: Connection, on_report: Tell) -> Failure | None:
        """Take one message; a pipe that closes without a result is a failure."""
        rank = self.pipes[pipe]
        try:
            message: Message = pipe.recv()
        except (EOFError, OSError):
            del self.pipes[pipe]
            pipe.close()
            return None if rank in self.finished else self._vanished(rank)
        if message.kind == "failure":
            # Its last word: that the pipe then closes says nothing more.
            del self.pipes[pipe]
            pipe.close()
            failure: Failure = message.content
            return failure
        if message.kind == "result":
            self.finished[rank] = message.content
        else:
            on_report(message.content)
        return None

    def _vanished(self, rank: int) -> Failure:
        process = self.processes[rank]
        process.join(10)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            how += " (is the machine out of memory?)" if -code == signal.SIGKILL else ""
        return Failure(rank, f"rank {rank} ended without a word, by {how}", False)

    def _cause(self, first: Failure) -> Failure:
        """The failure that others only follow from, if it arrives soon."""
        deadline = time.monotonic() + CAUSE_SECONDS
        known = first
        while known.is_consequence and self.pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(self.pipes), left):
                assert isinstance(pipe, Connection)
                known = _weightier(known, self._heard(pipe, lambda content: None))
        return known


def _weightier(known: Failure, other: Failure | None) -> Failure:
    return known if other is None or other.is_consequence else other


def _worker_main(pipe: Connection, rank: int, post: _Post, work: Work, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = post.place(rank)
        result = _in_group(pipe, rank, post, work, arguments)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(Message("failure", _failure(rank, error)))
        # Not by way of the interpreter's end: Gloo's threads may still wait for a peer there.
        sys.stderr.flush()
        os._exit(1)
    pipe.send(Message("result", result))
    pipe.close()


def _in_group(pipe: Connection, rank: int, post: _Post, work: Work, arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_per_worker(post.size))
    timeout = timedelta(seconds=post.timeout_seconds)
    address = f"file://{post.store}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=post.size, timeout=timeout)
    worker = Worker(rank, post.size, lambda content: pipe.send(Message("report", content)))
    result = work(worker, *arguments)
    # Without a barrier right before, Gloo's threads can meet an interpreter that is already going down.
    dist.barrier()
    dist.destroy_process_group()
    return result


def _failure(rank: int, error: BaseException) -> Failure:
    text = " ".join(str(error).split())
    if not isinstance(error, GradsieveError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
    sentence = text if f"rank {rank}" in text else f"rank {rank}: {text}"
    return Failure(rank, sentence, isinstance(error, PeerLostError) or "Connection closed by peer" in text)


def _end_with_parent() -> None:
    """A worker whose parent was killed must not stay behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by run_workers"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
