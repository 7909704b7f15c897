"""Rank processes: ranks as real processes on this machine that form a Gloo group, over loopback or a built network.

Processes are spawned, never forked: compiled kernels and torch's threads do not survive a fork. Each process has a pipe
to the parent for its reports, its result or its failure. However a rank process ends, the parent notices and ends the
others. However the parent ends, the rank processes end too.
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
CAUSE_SECONDS = 2.0  # how long to wait for the cause after a failure that only says that a peer was lost

Tell = Callable[[Any], None]
Work = Callable[..., Any]
"""A module-level function `work(process, *arguments)`; arguments, result and reports must be picklable."""

JoinNetwork = Callable[[int], str]
"""Called first in each rank process, with the rank. Enters that rank's network and returns the interface to use."""


class RankProcessError(GradsieveError, RuntimeError):
    """A rank process failed; the message contains its rank and its error."""

    def __init__(self, sentence: str, rank: int) -> None:
        super().__init__(sentence)
        self.rank = rank


@dataclass(frozen=True)
class RankProcess:
    """Passed to the work function of each rank, inside an initialized process group."""

    rank: int
    size: int
    report: Tell  # sends an object to the parent while the work goes on


class Failure(NamedTuple):
    """The last message of a rank process that failed."""

    rank: int
    sentence: str
    is_consequence: bool  # it only lost a peer: the failure of that peer is the cause


class Message(NamedTuple):
    """Sent from a rank process to the parent."""

    kind: str  # "report", "result" or "failure"
    content: Any


def threads_per_rank(size: int) -> int:
    """An equal share of the cores, at least one."""
    return max(1, num_cores() // size)


def join_loopback(rank: int) -> str:
    """Stay in the machine's own network and use its loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def run_rank_processes(
    size: int,
    work: Work,
    *arguments: Any,
    on_report: Tell | None = None,
    join_network: JoinNetwork = join_loopback,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run `work(process, *arguments)` in `size` processes and return the results in rank order.

    The timeout is that of the process group: how long a rank waits for its peers.

    Raises:
        RankProcessError: With the rank and the error of the process that failed first.
    """
    if size < 1:
        raise InputError(f"ranks must be at least 1, got {size}")
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as folder:
        group = _Group(size, str(Path(folder) / "store"), join_network, timeout_seconds)
        processes = _Processes(group, work, arguments)
        try:
            processes.start()
            return processes.results(on_report or (lambda content: None))
        finally:
            processes.stop()


class _Group(NamedTuple):
    """What every rank process needs to join the process group."""

    size: int
    store: str
    join_network: JoinNetwork
    timeout_seconds: float


class _Processes:
    """The parent's side: all processes, and the parent's ends of their pipes."""

    def __init__(self, group: _Group, work: Work, arguments: tuple[Any, ...]) -> None:
        self.size = group.size
        self.target_arguments = (group, work, arguments)
        self.processes: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        self.finished: dict[int, Any] = {}

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # otherwise the first process starts it, and that unblocks signals
        with held_back(signal.SIGINT):
            for rank in range(self.size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, rank, *self.target_arguments)
                process = context.Process(target=_process_main, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes[ours] = rank

    def results(self, on_report: Tell) -> list[Any]:
        while self.pipes:
            for pipe in wait(list(self.pipes)):
                assert isinstance(pipe, Connection)
                failure = self._receive(pipe, on_report)
                if failure is not None:
                    cause = self._cause(failure)
                    raise RankProcessError(cause.sentence, cause.rank)
        return [self.finished[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes that still run: SIGTERM first, SIGKILL after ten seconds."""
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

    def _receive(self, pipe: Connection, on_report: Tell) -> Failure | None:
        """Take one message. A pipe that closes without a result is a failure."""
        rank = self.pipes[pipe]
        try:
            message: Message = pipe.recv()
        except (EOFError, OSError):
            del self.pipes[pipe]
            pipe.close()
            return None if rank in self.finished else self._vanished(rank)
        if message.kind == "failure":
            # A failure is the last message: when the pipe closes afterwards, that is no second failure.
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
        return Failure(rank, f"rank {rank} ended without an error message, by {how}", False)

    def _cause(self, first: Failure) -> Failure:
        """The failure that caused the first one, if it arrives within `CAUSE_SECONDS`."""
        deadline = time.monotonic() + CAUSE_SECONDS
        known = first
        while known.is_consequence and self.pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(self.pipes), left):
                assert isinstance(pipe, Connection)
                known = _more_likely_cause(known, self._receive(pipe, lambda content: None))
        return known


def _more_likely_cause(known: Failure, other: Failure | None) -> Failure:
    return known if other is None or other.is_consequence else other


def _process_main(pipe: Connection, rank: int, group: _Group, work: Work, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = group.join_network(rank)
        result = _run_in_group(pipe, rank, group, work, arguments)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(Message("failure", _failure(rank, error)))
        # Not by a normal exit of the interpreter: Gloo's threads may still wait for a peer there.
        sys.stderr.flush()
        os._exit(1)
    pipe.send(Message("result", result))
    pipe.close()


def _run_in_group(pipe: Connection, rank: int, group: _Group, work: Work, arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_per_rank(group.size))
    timeout = timedelta(seconds=group.timeout_seconds)
    address = f"file://{group.store}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=group.size, timeout=timeout)
    process = RankProcess(rank, group.size, lambda content: pipe.send(Message("report", content)))
    result = work(process, *arguments)
    # Without a barrier right before, Gloo's threads may still run while the interpreter shuts down.
    dist.barrier()
    dist.destroy_process_group()
    return result


def _failure(rank: int, error: BaseException) -> Failure:
    text = " ".join(str(error).split())
    if not isinstance(error, GradsieveError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"
    sentence = text if f"rank {rank}" in text else f"rank {rank}: {text}"
    return Failure(rank, sentence, isinstance(error, PeerLostError) or "Connection closed by peer" in text)


def _end_with_parent() -> None:
    """End this process when its parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank process is started by run_rank_processes"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
