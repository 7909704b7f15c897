"""The handle a user holds: what is going on, saving and loading, dense for a while, the end."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import checkpoint
from gradsieve.checkpoint.reshard import Keep
from gradsieve.engine import Engine
from gradsieve.engine.worker import Worker
from gradsieve.errors import InputError
from gradsieve.stats import Stats
from gradsieve.stats.sinks import Sink, Sinks

T = TypeVar("T")


class Sieve:
    """One model's exchange on one rank. Call its methods between steps, and alike on all ranks."""

    def __init__(
        self,
        engine: Engine,
        worker: Worker | None = None,
        group: dist.ProcessGroup | None = None,
        sinks: Iterable[Sink] = (),
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.engine = engine
        self.parameters = tuple(parameters)  # that are exchanged
        self.worker = worker  # that exchanges; None: whoever calls does
        self._group = group
        self._sinks = Sinks(engine.comm.rank)
        # At exit the thread must be gone before the interpreter is.
        self._finalizer = weakref.finalize(self, _close, worker, self._sinks)
        try:
            for sink in sinks:
                self._sinks.add(sink)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> Stats:
        """Totals of this rank so far."""
        return self.engine.stats

    def add_sink(self, sink: Sink) -> None:
        """Have the figures of every step from now on written there, by rank 0 unless the sink says otherwise."""
        self._in_turn(lambda: self._sinks.add(sink))

    def flush(self) -> None:
        """Wait until all steps so far have been written to the sinks."""
        self._in_turn(lambda: None)

    def report(self) -> None:
        """Write the last step to the sinks; on the thread that exchanged it."""
        self._sinks.write(self.stats)

    def state_dict(self) -> dict[str, Any]:
        """All this rank must know to go on exactly as it would have. Every rank saves its own.

        It lies under a key of its own ("rank 2 of 4"), so that a sieve may be given to `torch.distributed.checkpoint`
        as it is, and all ranks' states together are one dict.
        """
        return checkpoint.packed(self.engine)

    def load_state_dict(self, states: Mapping[str, Any], *, keep: Keep = "sum") -> None:
        """Go on from what `state_dict` gave on this rank, or on all ranks of a run of another size.

        For another size, `states` holds what all its ranks saved, and every rank is given it. `keep="sum"` preserves
        the sum over ranks of all residuals; `keep="mean"` their effect on the parameters (see `checkpoint/reshard.py`).
        """
        checkpoint.unpack_into(self.engine, states, keep)

    def dense(self, steps: int | None = None) -> _DenseWhile:
        """Send everything, what is owed included, for a number of steps or until `sparse()`.

        As a context, until its end: `with sieve.dense(): ...`.
        """
        if steps is not None and steps < 0:
            raise InputError(f"rank {self.engine.comm.rank}: steps must not be negative, got {steps}")
        before = self.engine.dense_steps_left
        self.engine.go_dense(math.inf if steps is None else float(steps))
        return _DenseWhile(self.engine, before)

    def sparse(self) -> None:
        """Send only what the schedule says, from the next step on."""
        self.engine.go_dense(0.0)

    def adapt(self, optimizer: T) -> T:
        """Turn the optimizer whose updates are exchanged into its sieve-aware form, in place.

        `torch.optim.AdamW`, `Adam` and `SGD` become `gradsieve.AdamW`, `Adam` and `SGD`. Their state, parameter groups,
        hooks and schedulers are kept. `attach` does it by itself, except with `adapt=False`. Calling it again changes
        nothing. An optimizer without such a form is left as it is, with a warning.

        Args:
            optimizer: The optimizer that was given to `attach`, or a framework's wrapper of it.

        Returns:
            The same object.

        Raises:
            InputError: The sieve exchanges gradients, or the updates of another optimizer.

        Example:
            >>> sieve = gradsieve.attach(model, optimizer=optimizer, adapt=False)
            >>> optimizer = sieve.adapt(optimizer)
        """
        raise InputError(
            f"rank {self.engine.comm.rank}: this sieve exchanges gradients, and an optimizer is adapted only where its "
            "updates are exchanged: give it to gradsieve.attach(model, optimizer=optimizer)"
        )

    @property
    def clip_factor(self) -> float:
        """What a limit for the mean gradient is multiplied by to clip the gradients that the optimizer sees.

        1 if gradients are exchanged. The root of the number of ranks if updates are: each rank then sees its own
        gradient, which is mostly noise, and longer than the mean by about that factor.
        """
        return 1.0

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients that the optimizer sees, at a limit for the mean over all ranks.

        `torch.nn.utils.clip_grad_norm_` of all exchanged parameters, with `max_norm` times `clip_factor`. If updates
        are exchanged, each rank clips its own gradient by itself. Nothing is sent. With a `GradScaler`, call
        `scaler.unscale_(optimizer)` first, as for torch's.

        Args:
            max_norm: The limit that dense training would use.
            norm_type: The order of the norm.
            error_if_nonfinite: Whether to raise if the norm is not finite; else the gradients become NaN or zero.
            foreach: Whether torch takes its foreach implementation; its own choice if None.

        Returns:
            The norm before clipping.

        Example:
            >>> loss.backward()
            >>> sieve.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        limit = max_norm * self.clip_factor
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, norm_type, error_if_nonfinite, foreach)

    def close(self) -> None:
        """End the thread and the process group. The model cannot run another backward pass after that."""
        self._finalizer()
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError):  # it went with the default group
                dist.destroy_process_group(self._group)
        self._group = None

    def _in_turn(self, job: Callable[[], None]) -> None:
        """After all that the worker has to do."""
        if self.worker is None:
            job()
        else:
            self.worker.call(job)

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        engine = self.engine
        settings, comm = engine.settings, engine.comm
        sparse = [group for group in engine.groups if group.sparse]
        dense = [group for group in engine.groups if not group.sparse]
        yield f"Sieve(rank {comm.rank} of {comm.size}, step {engine.steps_done})"
        yield f"  recipe: {settings.recipe!r}"
        yield f"  density: {settings.schedule}" + (", dense for now" if engine.dense_steps_left else "")
        if self.stats.buffer_bytes:
            yield f"  sent by DDP itself: {self.stats.buffer_bytes:,} bytes of buffers at every forward pass"
        for title, groups in (("sent sparsely", sparse), ("kept dense", dense)):
            numel, count = sum(group.numel for group in groups), sum(len(group.slots) for group in groups)
            yield f"  {title}: {numel:,} entries of {count} parameters in {len(groups)} groups"
            for group in groups:
                own = "" if group.density is None else f", density {group.density:g}"
                yield f"    {group}{own}"


def _close(worker: Worker | None, sinks: Sinks) -> None:
    if worker is not None:
        worker.close()
    sinks.close()


class _DenseWhile:
    """What `Sieve.dense` gives back: nothing to most, a context to some."""

    def __init__(self, engine: Engine, before: float) -> None:
        self._engine = engine
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.go_dense(self._before)
