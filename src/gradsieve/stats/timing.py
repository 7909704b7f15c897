"""Measures the time of each phase: wrappers around comm, codec and the parts of a recipe share a clock.

The clock is always in one phase. A wrapper enters its own phase and then returns to the one before. So each moment
counts once, for the innermost phase. That costs two readings of the time per wrapped call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from gradsieve.comm import Comm
from gradsieve.feedback.base import Accumulated, WrappedFeedback
from gradsieve.kernels import Entries
from gradsieve.recipes import Recipe
from gradsieve.reducers.protocol import Reduced, WrappedReducer
from gradsieve.selectors.protocol import WrappedSelector
from gradsieve.stats.figures import Seconds
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces
from gradsieve.wire import Codec
from gradsieve.wire.message import NO_NOTE, Array, Arrived, Expected, Packed

IDLE = "idle"
PHASES = ("select", "encode", "communicate", "decode", "reduce", "settle")


class Clock:
    """Counts seconds by phase, on one thread."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((IDLE, *PHASES), 0.0)
        self._phase = IDLE
        self._since = time.perf_counter()

    def enter(self, phase: str) -> str:
        """Count for this phase from now on. Returns the phase before, to be entered again afterwards."""
        now = time.perf_counter()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        return before

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Count for this phase inside the context."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> Seconds:
        """Return the seconds since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys((IDLE, *PHASES), 0.0)
        return Seconds(**{phase: taken[phase] for phase in PHASES})


class TimedComm(Comm):
    """Wraps any comm. Time inside its calls is communication, time between two arrivals is not."""

    def __init__(self, comm: Comm, clock: Clock) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.clock = clock

    @property
    def seconds_per_byte(self) -> float:  # type: ignore[override]
        return self.comm.seconds_per_byte

    @contextmanager
    @override
    def aside(self) -> Iterator[Comm]:
        with self.clock.phase(IDLE), self.comm.aside() as comm:
            yield comm

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self.clock.phase("communicate"):
            return self.comm.all_reduce(tensor)

    @override
    def all_to_all(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        arrivals = self.comm.all_to_all(buffers)
        while True:
            with self.clock.phase("communicate"):
                arrived = next(arrivals, None)
            if arrived is None:
                return
            yield arrived

    @override
    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        with self.clock.phase("communicate"):
            return self.comm.send_recv(buffer, to, source)


@dataclass(frozen=True)
class TimedCodec(Codec):
    """Wraps a codec. Its value and index codes have the names of the wrapped one."""

    codec: Codec = field(kw_only=True)
    clock: Clock = field(kw_only=True)

    def __post_init__(self) -> None:
        """Skip the checks: the wrapped codec has done them, and this object is made again at every step."""

    @classmethod
    def around(cls, codec: Codec, clock: Clock) -> TimedCodec:
        """Return a codec that measures its time."""
        return cls(codec.values, codec.indices, codec=codec, clock=clock)

    @override
    def for_link(self, seconds_per_byte: float) -> Codec:
        return self.around(self.codec.for_link(seconds_per_byte), self.clock)

    @override
    def pack(self, vector: SparseVector, expected: Expected, low: int, note: Array = NO_NOTE) -> Packed:
        with self.clock.phase("encode"):
            return self.codec.pack(vector, expected, low, note)

    @override
    def unpack(self, message: Tensor, expected: Expected, low: int, high: int, source: int) -> Arrived:
        with self.clock.phase("decode"):
            return self.codec.unpack(message, expected, low, high, source)


@dataclass(frozen=True, repr=False)
class TimedFeedback(WrappedFeedback):
    """Wraps feedback. Accumulating counts as selecting."""

    clock: Clock

    @override
    def accumulate(self, grad: Pieces, out: Pieces, state: Any, floor: float | None, expected: int) -> Accumulated:
        with self.clock.phase("select"):
            return super().accumulate(grad, out, state, floor, expected)

    @override
    def settle(self, accumulated: Tensor, grad: Pieces, local: SparseVector, leftover: SparseVector, state: Any) -> Any:
        with self.clock.phase("settle"):
            return super().settle(accumulated, grad, local, leftover, state)


@dataclass(frozen=True, repr=False)
class TimedSelector(WrappedSelector):
    """Wraps a selector."""

    clock: Clock

    @override
    def select(self, accumulated: Tensor, k: int, state: Any, candidates: Entries | None) -> tuple[SparseVector, Any]:
        with self.clock.phase("select"):
            return super().select(accumulated, k, state, candidates)


@dataclass(frozen=True, repr=False)
class TimedReducer(WrappedReducer):
    """Wraps a reducer. Its time is without communication and coding, which comm and codec measure."""

    clock: Clock

    @override
    def start(self, numel: int, comm: Comm) -> Any:
        return super().start(numel, TimedComm(comm, self.clock))

    @override
    def reduce(self, local: SparseVector, k: int, state: Any, comm: Comm) -> tuple[Reduced, Any]:
        with self.clock.phase("reduce"):
            return super().reduce(local, k, state, TimedComm(comm, self.clock))


def timed(recipe: Recipe, clock: Clock) -> Recipe:
    """Return the same recipe with parts that measure their time."""
    reducer = recipe.reducer.with_codec(TimedCodec.around(recipe.reducer.codec, clock))
    return Recipe(
        TimedSelector(recipe.selector, clock), TimedReducer(reducer, clock), TimedFeedback(recipe.feedback, clock)
    )
