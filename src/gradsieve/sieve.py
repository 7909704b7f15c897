"""The handle that `attach` returns: statistics, checkpoints, dense phases, clipping and the end."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import checkpoint
from gradsieve.checkpoint.reshard import Keep
from gradsieve.engine import Engine
from gradsieve.engine.dense_phase import DensePhase
from gradsieve.engine.description import described
from gradsieve.engine.worker import Worker
from gradsieve.errors import InputError
from gradsieve.stats import Stats
from gradsieve.stats.sinks import Sink, Sinks

T = TypeVar("T")


class Sieve:
    """The exchange of one model on one rank.

    `gradsieve.attach` and the optimizers of `gradsieve` make it. Call its methods between steps, and the same ones on
    all ranks.

    Args:
        engine: The groups of parameters and their states.
        worker: The thread that exchanges; None if the calling thread does.
        group: The process group that `close` destroys; None if there is none.
        sinks: They get the statistics of every step.
        parameters: The exchanged parameters.

    Raises:
        InputError: A sink cannot be opened.

    Example:
        >>> import gradsieve
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        >>> sieve.exchange()
        >>> sieve.close()
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker | None = None,
        group: dist.ProcessGroup | None = None,
        sinks: Iterable[Sink] = (),
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.engine = engine
        self.parameters = tuple(parameters)
        self.worker = worker
        self._group = group
        self.sinks = Sinks(engine.comm.rank)
        # At exit the worker must end before the interpreter does.
        self._finalizer = weakref.finalize(self, _close, worker, self.sinks)
        try:
            for sink in sinks:
                self.sinks.add(sink)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> Stats:
        """The totals of this rank since it was attached."""
        return self.engine.stats

    def add_sink(self, sink: Sink) -> None:
        """Write the statistics of every step from now on to a sink.

        Rank 0 writes, or every rank if the sink says so (`Sink.every_rank`).

        Args:
            sink: Where the statistics go.

        Raises:
            InputError: The sink cannot be opened.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> sieve.add_sink(gradsieve.JsonLines("steps.jsonl"))
        """
        self._in_turn(lambda: self.sinks.add(sink))

    def flush(self) -> None:
        """Wait until all steps so far have been written to the sinks.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> sieve.flush()
        """
        self._in_turn(lambda: None)

    def report(self) -> None:
        """Write the last step to the sinks. Called after every step by the thread that exchanged it."""
        self.sinks.write(self.stats)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to continue bit for bit. Each rank saves its own state.

        The state is under a key of its own, such as "rank 2 of 4". So a sieve can be given to
        `torch.distributed.checkpoint` as it is, and the states of all ranks together are one dict.

        Returns:
            Plain containers and tensors, for `torch.save`.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> list(sieve.state_dict())
            ['rank 0 of 1']
        """
        return checkpoint.packed(self.engine)

    def load_state_dict(self, states: Mapping[str, Any], *, keep: Keep = "sum") -> None:
        """Continue from the state that this rank saved, or from the states of all ranks of a run of another size.

        Args:
            states: This rank's `state_dict()`. After a change of the number of ranks: the states of all old ranks in
                one dict, the same on every rank.
            keep: What a change of the number of ranks preserves: "sum" is the sum of all residuals, "mean" is their
                effect on the parameters (see `gradsieve.checkpoint.reshard`).

        Raises:
            InputError: The state is incomplete, or belongs to another model or recipe. Nothing has been changed.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> sieve.load_state_dict(sieve.state_dict())
        """
        checkpoint.unpack_into(self.engine, states, keep)

    def dense(self, steps: int | None = None) -> DensePhase:
        """Send all entries, including the residual, for a number of steps or until `sparse()`.

        Args:
            steps: The number of steps; None is until `sparse()` is called.

        Returns:
            A context manager, which may be ignored. As a context, the dense phase ends with it.

        Raises:
            InputError: `steps` is negative.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> with sieve.dense():
            ...     model(inputs).sum().backward()
            ...     optimizer.step()
            ...     sieve.exchange()
            >>> sieve.stats.dense_steps
            1
        """
        if steps is not None and steps < 0:
            raise InputError(f"rank {self.engine.comm.rank}: steps must not be negative, got {steps}")
        before = self.engine.dense_steps_left
        self.engine.go_dense(math.inf if steps is None else float(steps))
        return DensePhase(self.engine, before)

    def exchange(self) -> None:
        """Exchange what the last step left to exchange. All ranks call it together, after the last step of training.

        Updates are exchanged before the next training pass, so those of the last step would otherwise stay in each
        rank's residual. Gradients are exchanged during their own backward pass, and nothing is left to do.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> model(inputs).sum().backward()
            >>> optimizer.step()
            >>> sieve.exchange()
            >>> sieve.stats.steps
            1
        """

    def sparse(self) -> None:
        """End a dense phase: from the next step on, the schedule gives the density again.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> _ = sieve.dense()
            >>> sieve.sparse()
        """
        self.engine.go_dense(0.0)

    def adapt(self, optimizer: T) -> T:
        """Turn the optimizer whose updates are exchanged into its sieve-aware form, in place.

        `torch.optim.AdamW`, `Adam` and `SGD` become `gradsieve.AdamW`, `Adam` and `SGD`. Their state, parameter groups,
        hooks and schedulers are kept. `attach` calls this itself, except with `adapt=False`. An optimizer without such
        a form is left as it is, with a warning.

        Args:
            optimizer: The optimizer that was given to `attach`, or a framework's wrapper of it.

        Returns:
            The same object.

        Raises:
            InputError: The sieve exchanges gradients, or the updates of another optimizer.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer, adapt=False)
            >>> isinstance(sieve.adapt(optimizer), gradsieve.AdamW)
            True
        """
        raise InputError(
            f"rank {self.engine.comm.rank}: this sieve exchanges gradients, and an optimizer is adapted only if its "
            "updates are exchanged: use gradsieve.attach(model, optimizer=optimizer)"
        )

    @property
    def clip_factor(self) -> float:
        """The factor from a clipping limit for the mean gradient to one for the gradient that the optimizer sees.

        It is 1 if gradients are exchanged. If updates are exchanged it is the square root of the number of ranks: each
        optimizer then sees its own rank's gradient, which is mostly noise and longer than the mean by about that
        factor.
        """
        return 1.0

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip the gradients that the optimizer sees, given the limit that dense training would use.

        This is `torch.nn.utils.clip_grad_norm_` of all exchanged parameters at `max_norm` times `clip_factor`. If
        updates are exchanged, each rank clips its own gradient. With a `GradScaler`, call `scaler.unscale_(optimizer)`
        first.

        Args:
            max_norm: The limit for the norm of the mean gradient.
            norm_type: The order of the norm.
            error_if_nonfinite: Whether to raise if the norm is not finite; otherwise the gradients become NaN or zero.
            foreach: Whether torch uses its foreach implementation; None lets torch choose.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: The norm is not finite, and `error_if_nonfinite` is set.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> model(inputs).sum().backward()
            >>> norm = sieve.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        limit = max_norm * self.clip_factor
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, norm_type, error_if_nonfinite, foreach)

    def close(self) -> None:
        """End the worker, the sinks and the process group. The model cannot be trained any further.

        Example:
            >>> import gradsieve
            >>> sieve = gradsieve.attach(model, optimizer=optimizer)
            >>> sieve.close()
        """
        self._finalizer()
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError):  # destroyed with the default group
                dist.destroy_process_group(self._group)
        self._group = None

    def _in_turn(self, job: Callable[[], None]) -> None:
        """Run a job after all jobs that the worker has."""
        if self.worker is None:
            job()
        else:
            self.worker.call(job)

    def __repr__(self) -> str:
        return "\n".join(described(self.engine))


def _close(worker: Worker | None, sinks: Sinks) -> None:
    if worker is not None:
        worker.close()
    sinks.close()
