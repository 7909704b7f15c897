"""A dense phase as a context: it ends with the `with` block."""

from __future__ import annotations

from types import TracebackType

from gradsieve.engine.engine import Engine


class DensePhase:
    """The optional context of `Sieve.dense`. At its end, the number of dense steps is what it was before."""

    def __init__(self, engine: Engine, before: float) -> None:
        self._engine = engine
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.go_dense(self._before)
