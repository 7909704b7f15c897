"""Where the time goes, measured from outside: wrappers around comm, codec and pipeline that share a clock.

The clock is always in one phase. A wrapper enters its own and goes back to the one it came from, so each moment counts
once, for the innermost. That costs two readings of the time for each call that is wrapped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.pieces import Pieces
from gradsieve.pipeline import Exchanged, Pipeline, PipelineState
from gradsieve.recipes import Recipe
from gradsieve.reducers import Reduced
from gradsieve.stats import Seconds
from gradsieve.vector import SparseVector
from gradsieve.wire import Codec
from gradsieve.wire.message import NO_NOTE, Array, Arrived, Expected, Packed

IDLE = "idle"
PHASES = ("select", "encode", "communicate", "decode", "reduce", "settle")


class Clock:
    """Seconds by phase, of one thread."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((IDLE, *PHASES), 0.0)
        self._phase = IDLE
        self._since = time.perf_counter()

    def enter(self, phase: str) -> str:
        """From now on time counts for this phase; the one before comes back, to be entered again afterwards."""
        now = time.perf_counter()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        return before

    def take(self) -> Seconds:
        """What has been counted since this was last asked."""
        taken, self._seconds = self._seconds, dict.fromkeys((IDLE, *PHASES), 0.0)
        return Seconds(**{phase: taken[phase] for phase in PHASES})


class TimedComm(Comm):
    """Wraps any comm: all time inside its calls is communication, the time between two arrivals is not."""

    def __init__(self, comm: Comm, clock: Clock) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.clock = clock

    @property
    def seconds_per_byte(self) -> float:  # type: ignore[override]
        """As the wrapped comm has measured."""
        return self.comm.seconds_per_byte

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Comm.all_reduce`."""
        before = self.clock.enter("communicate")
        try:
            return self.comm.all_reduce(tensor)
        finally:
            self.clock.enter(before)

    def exchange(self, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """See `Comm.exchange`."""
        arrivals = self.comm.exchange(buffers)
        while True:
            before = self.clock.enter("communicate")
            try:
                arrived = next(arrivals, None)
            finally:
                self.clock.enter(before)
            if arrived is None:
                return
            yield arrived

    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """See `Comm.send_recv`."""
        before = self.clock.enter("communicate")
        try:
            return self.comm.send_recv(buffer, to, source)
        finally:
            self.clock.enter(before)


@dataclass(frozen=True)
class TimedCodec(Codec):
    """Wraps a codec, whose names it bears."""

    codec: Codec = field(kw_only=True)
    clock: Clock = field(kw_only=True)

    def __post_init__(self) -> None:
        """The codec it wraps has checked its names; this one is made anew at every step."""

    @classmethod
    def around(cls, codec: Codec, clock: Clock) -> TimedCodec:
        """This codec, timed."""
        return cls(codec.values, codec.indices, codec=codec, clock=clock)

    def for_link(self, seconds_per_byte: float) -> Codec:
        """See `Codec.for_link`."""
        return self.around(self.codec.for_link(seconds_per_byte), self.clock)

    def pack(self, vector: SparseVector, expected: Expected, low: int, note: Array = NO_NOTE) -> Packed:
        """See `Codec.pack`."""
        before = self.clock.enter("encode")
        try:
            return self.codec.pack(vector, expected, low, note)
        finally:
            self.clock.enter(before)

    def unpack(self, message: Tensor, expected: Expected, low: int, high: int, source: int) -> Arrived:
        """See `Codec.unpack`."""
        before = self.clock.enter("decode")
        try:
            return self.codec.unpack(message, expected, low, high, source)
        finally:
            self.clock.enter(before)


class TimedPipeline(Pipeline):
    """A pipeline over a timed comm and a timed codec. What is neither selecting nor reducing is settling."""

    def __init__(self, recipe: Recipe, comm: Comm, clock: Clock) -> None:
        codec = TimedCodec.around(recipe.reducer.codec, clock)
        super().__init__(replace(recipe, reducer=replace(recipe.reducer, codec=codec)), TimedComm(comm, clock))
        self.clock = clock

    def exchange(self, grad: Pieces, k: int, state: PipelineState, out: Pieces) -> Exchanged:
        """See `Pipeline.exchange`."""
        before = self.clock.enter("settle")
        try:
            return super().exchange(grad, k, state, out)
        finally:
            self.clock.enter(before)

    def _select(self, grad: Pieces, k: int, state: PipelineState, out: Pieces) -> tuple[Tensor, SparseVector, Any]:
        before = self.clock.enter("select")
        try:
            return super()._select(grad, k, state, out)
        finally:
            self.clock.enter(before)

    def _reduce(self, local: SparseVector, k: int, state: PipelineState) -> tuple[Reduced, Any]:
        before = self.clock.enter("reduce")
        try:
            return super()._reduce(local, k, state)
        finally:
            self.clock.enter(before)
