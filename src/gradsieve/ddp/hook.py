"""What DDP calls: buckets come in, futures go out, a worker thread exchanges in between.

1. Each bucket's slices are delivered to the groups their parameters belong to.
2. Groups that have become complete go to the worker, in their fixed order.
3. A bucket's future resolves when all groups with a part in it have been written back.
4. At the end of backward the step has been committed or undone, and whatever went wrong is raised.

No `from __future__ import annotations` here: DDP reads the hook's annotations and must find types, not texts.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsieve.engine import Engine, Step
from gradsieve.engine.replicas import compare_replicas
from gradsieve.engine.scaling import Scaler, scale_of
from gradsieve.errors import ExchangeError, GradsieveError, PeerLostError, ReplicaError
from gradsieve.sieve import Sieve

NO_GRAPH_TASK = -1  # what autograd says outside of a backward pass
SHOWN_NAMES = 4


class Waiting(NamedTuple):
    """A bucket under way."""

    groups: set[int]  # that have a part in it and are not done
    buffer: Tensor
    future: "torch.futures.Future[Tensor]"


class Feed:
    """One DDP model's buckets to one engine: the state of the hook."""

    def __init__(self, sieve: Sieve, names: dict[Tensor, str], scaler: Scaler | None) -> None:
        self.sieve = sieve  # held here, so that it lives as long as the model even if the user lets go of it
        self.engine = sieve.engine
        assert sieve.worker is not None, "under DDP a thread exchanges"
        self.worker = sieve.worker
        self.names = names
        self.has_run = False
        self._scaler = scaler
        self._pass: Pass | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """One bucket of one backward pass."""
        self.has_run = True
        in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
        if self._pass is None:
            # DDP's `join` runs the hook outside of any backward pass on ranks whose inputs have ended.
            self._pass = Pass(
                self, self._begin() if in_backward else self._begin_joined(), self._comparison(in_backward)
            )
        elif bucket.index() == 0:
            self._pass.fail(_unfinished(self.engine.comm.rank))
        current = self._pass
        future = current.take(bucket)
        if bucket.is_last() and in_backward:
            # DDP queues its own end of the pass after this; so an error is raised before it looks at the futures.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif bucket.is_last():
            self._finish()
        return future

    def _begin(self) -> Step:
        return Step(self.engine, scale_of(self._scaler))

    def _begin_joined(self) -> Step:
        """A rank whose inputs have ended no longer updates its scaler: then it cannot tell the unit others send in."""
        return Step(self.engine, joined=True, withhold=self._scaler is not None)

    def _comparison(self, in_backward: bool) -> Callable[[], None] | None:
        """Of all ranks' parameters, if it is time. In `join` a rank whose inputs have ended updates them no more."""
        every = self.engine.settings.check_replicas_every
        if not every or self.engine.steps_done % every:  # by the run's own clock: a resumed run does the same
            return None
        parameters = {name: tensor for tensor, name in self.names.items()}
        return lambda: compare_replicas(parameters, self.engine.comm, joined=not in_backward)

    def _finish(self) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            current.wait()


class Pass:
    """One backward pass: its step, and the buckets whose groups are under way."""

    def __init__(self, feed: Feed, step: Step, first: Callable[[], None] | None = None) -> None:
        self._feed = feed
        self._step = step
        self._first = first  # to be done by the worker before anything is exchanged
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._done = threading.Event()
        self._error: BaseException | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Deliver a bucket. Errors are kept for the end of the pass: DDP would make them unreadable here."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        groups: set[int] = set()
        try:
            groups = self._deliver(bucket, buffer)
        except Exception as error:
            self.fail(error)
        with self._lock:
            self._waiting.append(Waiting(groups, buffer, future))
        try:
            self._start()
        except Exception as error:
            self.fail(error)
        self._release(None)  # at once, if something has gone wrong before
        return future

    def wait(self) -> None:
        """Until all groups are done; raises what went wrong with any of them."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Remember what went wrong first, exchange nothing more, let no bucket wait."""
        with self._lock:
            self._error = self._error or error
        self._release(None)

    def _deliver(self, bucket: GradBucket, buffer: Tensor) -> set[int]:
        if buffer.layout != torch.strided:
            raise GradsieveError(
                f"rank {self._feed.engine.comm.rank}: a sparse gradient came, which cannot be exchanged: "
                "make its embedding with sparse=False"
            )
        self._wait_for_stream(buffer)
        groups = set()
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = grad.storage_offset() - buffer.storage_offset()
            if grad.numel():
                flat = buffer[start : start + grad.numel()]
                groups.add(self._step.deliver(self._feed.names[parameter], flat))
        return groups

    def _wait_for_stream(self, buffer: Tensor) -> None:
        """On CUDA the worker's stream must not read the bucket before backward's has written it."""
        if buffer.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._feed.worker.submit(event.wait)

    def _start(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            # Parameters stay as they are until the pass ends, since the optimizer waits for it.
            self._feed.worker.submit(first, self._failed_at(None))
        for index in self._step.ready() if self._error is None else ():
            self._feed.worker.submit(partial(self._exchange, index), self._failed_at(index))

    def _failed_at(self, index: int | None) -> Callable[[BaseException], None]:
        def failed(error: BaseException) -> None:
            described = error
            try:
                described = located(error, self._feed.engine, index)
            finally:  # the end of the pass waits for this, whatever an error's text does
                self.fail(described)

        return failed

    def _exchange(self, index: int) -> None:
        """On the worker's thread."""
        last = index == len(self._feed.engine.groups) - 1
        if self._error is None:
            self._step.exchange(index)
        if self._error is None and last:
            self._step.finish()
        self._release(index, finished=last)
        if last and self._error is None:
            # No one waits for it: the next step's gradients come much later. Its errors are no longer this pass's.
            self._feed.worker.submit(self._feed.sieve.report)

    def _release(self, index: int | None, finished: bool = False) -> None:
        """Resolve the futures of buckets that wait for nothing any more; all of them if something went wrong."""
        with self._lock:
            for waiting in self._waiting:
                waiting.groups.discard(-1 if index is None else index)
            failed = self._error is not None
            free = [waiting for waiting in self._waiting if failed or not waiting.groups]
            self._waiting = [waiting for waiting in self._waiting if waiting.groups and not failed]
        for waiting in free:
            waiting.future.set_result(waiting.buffer)
        if finished or failed:
            self._done.set()


def exchange_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function DDP is given."""
    feed: Feed = state
    return feed.take(bucket)


def located(error: BaseException, engine: Engine, index: int | None) -> BaseException:
    """The same kind of error, saying where it happened; without a group, when all parameters were compared."""
    if index is None and isinstance(error, ReplicaError):
        return error  # it says so itself
    text = f"rank {engine.comm.rank}: step {engine.steps_done}, {_where(engine, index)} failed: {error}"
    located: GradsieveError = ExchangeError(text)
    if isinstance(error, GradsieveError):
        with contextlib.suppress(TypeError):  # a type of someone else's may have another constructor
            located = type(error)(text)
    if isinstance(error, PeerLostError) and isinstance(located, PeerLostError):
        located.peer, located.phase, located.group = error.peer, error.phase, index
    located.__cause__ = error
    return located


def _where(engine: Engine, index: int | None) -> str:
    if index is None:
        return "all parameters: their comparison"
    names = engine.groups[index].names
    shown = ", ".join(names[:SHOWN_NAMES]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else "")
    return f"group {index} of {len(engine.groups)}, parameters {shown}: the exchange"


def _unfinished(rank: int) -> GradsieveError:
    return GradsieveError(
        f"rank {rank}: the backward pass before this one did not deliver all gradients (it failed, or some parameters "
        "took no part: then give DDP find_unused_parameters=True); ranks may differ now: start again from a checkpoint"
    )
