"""The communication hook: DDP passes buckets and gets futures, and the worker exchanges in between.

1. The slices of each bucket are delivered to the groups of their parameters.
2. Complete groups are submitted to the worker, in their fixed order.
3. A bucket's future resolves when all groups with a part in the bucket have been written back.
4. At the end of backward the step has been committed or discarded, and the first error is raised.

No `from __future__ import annotations` here: DDP reads the hook's annotations, which must be types, not strings.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsieve.ddp.located import located
from gradsieve.ddp.plain import PlainPass, PlainSums
from gradsieve.engine import Step
from gradsieve.engine.decision import GradientDecision
from gradsieve.engine.replicas import compare_replicas
from gradsieve.engine.scaling import Scaler, scale_of
from gradsieve.errors import GradsieveError
from gradsieve.sieve import Sieve

NO_GRAPH_TASK = -1  # autograd's task id outside of a backward pass


class Waiting(NamedTuple):
    """A bucket whose future has not been resolved."""

    groups: set[int]  # groups with a part in the bucket that are not done
    buffer: Tensor
    future: "torch.futures.Future[Tensor]"


class Feed:
    """The state of the hook: passes the buckets of one DDP model to one engine."""

    def __init__(
        self,
        sieve: Sieve,
        names: dict[Tensor, str],
        scaler: Scaler | None,
        decision: GradientDecision | None = None,
        sums: PlainSums | None = None,
    ) -> None:
        self.sieve = sieve  # held here, so that it lives as long as the model even if the user drops it
        self.engine = sieve.engine
        assert sieve.worker is not None, "under DDP a worker exchanges"
        self.worker = sieve.worker
        self.names = names
        self.has_run = False
        self._scaler = scaler
        self._decision, self._sums = decision, sums
        self._pass: Pass | PlainPass | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Take one bucket of one backward pass."""
        self.has_run = True
        in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
        if self._pass is None:
            self._pass = self._begin(in_backward)
        elif bucket.index() == 0:
            self._pass.fail(_unfinished(self.engine.comm.rank))
        current = self._pass
        future = current.take(bucket)
        if bucket.is_last() and in_backward:
            # DDP queues its own callback after this one. So an error is raised before DDP waits for the futures.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif bucket.is_last():
            self._finish()
        return future

    def _begin(self, in_backward: bool) -> "Pass | PlainPass":
        """Begin a pass. On ranks whose inputs have ended, DDP's `join` calls the hook outside of any backward pass."""
        failed: BaseException | None = None
        decision = self._decision
        if decision is not None:
            try:
                if decision.chooser.is_due:
                    self.worker.call(decision.compare)
                decision.apply()
            except Exception as error:
                failed = located(error, self.engine, None, "times")
            decision.begin_step()
        first = self._comparison(in_backward)
        begun: Pass | PlainPass
        if decision is not None and decision.is_plain:
            assert self._sums is not None, "a decision includes DDP's own sums"
            begun = PlainPass(self.sieve, self._sums, first)
        else:
            begun = Pass(self, self._begun_step(in_backward), first)
        if failed is not None:
            begun.fail(failed)
        return begun

    def _begun_step(self, in_backward: bool) -> Step:
        """The scaler of a rank whose inputs have ended is out of date: its residual must wait."""
        if in_backward:
            return Step(self.engine, scale_of(self._scaler))
        return Step(self.engine, joined=True, withhold=self._scaler is not None)

    def _comparison(self, in_backward: bool) -> Callable[[], None] | None:
        """Return the comparison of all ranks' parameters if it is due. A joined rank no longer updates its own."""
        every = self.engine.settings.check_replicas_every
        if not every or self.engine.steps_done % every:  # counted in steps of the run: a resumed run does the same
            return None
        parameters = {name: tensor for tensor, name in self.names.items()}
        return lambda: compare_replicas(parameters, self.engine.comm, joined=not in_backward)

    def _finish(self) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            began = time.perf_counter()
            current.wait()
            if self._decision is not None:
                self._decision.exposed_seconds = time.perf_counter() - began
                self._decision.end_step()
                self._decision.record()


class Pass:
    """One backward pass: its step, and the buckets that wait for their groups."""

    def __init__(self, feed: Feed, step: Step, first: Callable[[], None] | None = None) -> None:
        self._feed = feed
        self._step = step
        self._first = first  # the worker does it before the first exchange
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._done = threading.Event()
        self._error: BaseException | None = None

    def take(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Deliver a bucket. Errors are kept until the end of the pass: raised here, DDP would make them unreadable."""
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
        self._release(None)  # at once, if the pass has failed before
        return future

    def wait(self) -> None:
        """Wait until all groups are done, and raise the first error."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Keep the first error, exchange nothing more, and let no bucket wait."""
        with self._lock:
            self._error = self._error or error
        self._release(None)

    def _deliver(self, bucket: GradBucket, buffer: Tensor) -> set[int]:
        if buffer.layout != torch.strided:
            raise GradsieveError(
                f"rank {self._feed.engine.comm.rank}: got a sparse gradient, which cannot be exchanged: "
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
        """On CUDA, let the worker's stream wait until backward's stream has written the bucket."""
        if buffer.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._feed.worker.submit(event.wait)

    def _start(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            # The parameters do not change before the pass ends, since the optimizer waits for it.
            self._feed.worker.submit(first, self._failed_at(None))
        for index in self._step.ready() if self._error is None else ():
            self._feed.worker.submit(partial(self._exchange, index), self._failed_at(index))

    def _failed_at(self, index: int | None) -> Callable[[BaseException], None]:
        def failed(error: BaseException) -> None:
            described = error
            try:
                described = located(error, self._feed.engine, index)
            finally:  # the end of the pass waits for this, even if making the error's text fails
                self.fail(described)

        return failed

    def _exchange(self, index: int) -> None:
        """Exchange one group, on the worker."""
        last = index == len(self._feed.engine.groups) - 1
        if self._error is None:
            self._step.exchange(index)
        if self._error is None and last:
            self._step.finish()
        self._release(index, finished=last)
        if last and self._error is None and self._feed.sieve.sinks:
            # Nothing waits for the report. Its errors do not belong to this pass.
            self._feed.worker.submit(self._feed.sieve.report)

    def _release(self, index: int | None, finished: bool = False) -> None:
        """Resolve the futures of buckets whose groups are all done; those of all buckets if the pass failed."""
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
    """The hook that DDP calls for each bucket of gradients."""
    feed: Feed = state
    return feed.take(bucket)


def _unfinished(rank: int) -> GradsieveError:
    return GradsieveError(
        f"rank {rank}: the previous backward pass did not deliver all gradients: it failed, or it did not use all "
        "parameters (then give DDP find_unused_parameters=True); ranks may differ now: start again from a checkpoint"
    )
