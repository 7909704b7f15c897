"""The worker: the thread that exchanges while backward continues.

All calls on a process group must come from one thread, and in the same order on all ranks. The worker is that thread.
It runs its jobs one after the other, in the order in which they were submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from gradsieve.errors import ExchangeError, GradsieveError

T = TypeVar("T")
Failed = Callable[[BaseException], None]
STOP_SECONDS = 5.0  # how long `close` waits for a thread that may be waiting for a lost peer


class Job(NamedTuple):
    """A function to call, and the function that gets its error."""

    work: Callable[[], None]
    failed: Failed


class Worker:
    """One thread and its queue of jobs. It ends with `close`, or with the process.

    A job that raises does not end the thread. Its error goes to the job's `failed`. If there is none, the next call of
    `submit` or `call` raises it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException] = SimpleQueue()  # not yet raised by a call
        # A daemon: a peer that does not answer must not keep this process from ending.
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._errors), name=name, daemon=True)
        self._thread.start()
        self.closed = False

    def submit(self, work: Callable[[], None], failed: Failed | None = None) -> None:
        """Run `work` on the worker after all earlier jobs. The worker calls `failed` with its error."""
        if self.closed:
            raise GradsieveError("this sieve has been closed and exchanges nothing: wrap the model again and attach")
        self._raise_kept()
        self._jobs.put(Job(work, failed or self._errors.put))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the worker, wait for it, and return its result or raise its error."""
        result: Future[T] = Future()
        self.submit(lambda: result.set_result(work()), result.set_exception)
        return result.result()

    def close(self) -> None:
        """End the thread after its jobs. A thread that waits for a lost peer is abandoned after `STOP_SECONDS`."""
        if not self.closed:
            self.closed = True
            self._jobs.put(None)
            self._thread.join(STOP_SECONDS)

    def _raise_kept(self) -> None:
        if not self._errors.empty():
            error = self._errors.get()
            raise ExchangeError(f"the exchanging thread failed before this call: {error!r}") from error


def _work(jobs: SimpleQueue[Job | None], errors: SimpleQueue[BaseException]) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:
                _tell(job.failed, error, errors)
            del job  # or the gradients of the last step would be held until the next one


def _tell(failed: Failed, error: BaseException, errors: SimpleQueue[BaseException]) -> None:
    try:
        failed(error)
    except BaseException as another:
        another.__context__ = error
        errors.put(another)
