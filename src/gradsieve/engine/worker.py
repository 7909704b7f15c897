"""The thread that exchanges, so that backward can go on meanwhile.

All calls on a process group must come from one thread and in the same order on all ranks. This is that thread; jobs run
one after the other as they were given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch

from gradsieve.errors import GradsieveError

T = TypeVar("T")
Job = Callable[[], None]
STOP_SECONDS = 5.0


class Worker:
    """One thread and its queue of jobs. It ends with `close`, or with the process."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A daemon: a peer that does not answer must not keep this process from ending.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self.closed = False

    def submit(self, job: Job) -> None:
        """Have a job done after those before it. It must see to its own errors."""
        if self.closed:
            raise GradsieveError("this sieve has been closed: it exchanges nothing any more")
        self._jobs.put(job)

    def call(self, work: Callable[[], T]) -> T:
        """Have something done by the thread and wait for what comes of it."""
        result: Future[T] = Future()

        def job() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        self.submit(job)
        return result.result()

    def close(self) -> None:
        """End the thread after the jobs it has; once it waits for a peer, it is left to itself."""
        if not self.closed:
            self.closed = True
            self._jobs.put(None)
            self._thread.join(STOP_SECONDS)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job()
            del job  # or the last step's gradients would be held until the next one
