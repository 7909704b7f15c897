"""Sinks record the statistics of every step: a file of JSON lines, TensorBoard, or a class of your own.

A sink that cannot be opened raises at once. A sink that fails later is closed and named in the log (logger `gradsieve`,
level error): a full disk must not end a training run, and the log says that the file is incomplete.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.stats.figures import Stats

RANK_FIELD = "{rank}"


class Sink(ABC):
    """Base of sinks: gets the statistics after every step, on rank 0 or on every rank."""

    every_rank: bool = False

    @abstractmethod
    def open(self, rank: int) -> None:
        """Get ready. Called once, on ranks that write."""

    @abstractmethod
    def write(self, stats: Stats) -> None:
        """Record a step. `stats.last` is that step, the rest are the totals including it."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Release resources. No step follows."""


class JsonLines(Sink):
    """Writes one JSON object per line and step: the figures of `StepStats.as_dict` and the rank.

    Lines are flushed after each step, and appended to a file that exists.

    Args:
        path: The file. Every rank writes its own if the path contains `{rank}`; otherwise only rank 0 writes.

    Example:
        >>> import gradsieve
        >>> import json
        >>> from pathlib import Path
        >>> sieve = gradsieve.attach(model, optimizer=optimizer, sinks=[gradsieve.JsonLines("steps.jsonl")])
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        >>> sieve.exchange()
        >>> sieve.flush()
        >>> json.loads(Path("steps.jsonl").read_text())["counted"]
        True
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = str(path)
        self.every_rank = RANK_FIELD in self.path
        self._rank = 0
        self._file: TextIO | None = None

    @override
    def open(self, rank: int) -> None:
        path = Path(self.path.replace(RANK_FIELD, str(rank)))
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"rank {rank}: {path} cannot be written: {error.strerror}") from error
        self._rank = rank

    @override
    def write(self, stats: Stats) -> None:
        assert self._file is not None
        assert stats.last is not None
        self._file.write(json.dumps({"rank": self._rank} | stats.last.as_dict()) + "\n")
        self._file.flush()

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __repr__(self) -> str:
        return f"JsonLines({self.path!r})"


class TensorBoard(Sink):
    """Writes one scalar per figure and step to TensorBoard, on rank 0.

    Args:
        target: A log directory, or a `SummaryWriter`, which is not closed.
        prefix: Scalars are named `prefix/figure`.

    Raises:
        InputError: `target` is neither, or no package for TensorBoard is installed.

    Example:
        >>> import gradsieve
        >>> sieve = gradsieve.attach(model, optimizer=optimizer, sinks=[gradsieve.TensorBoard("runs")])
    """

    def __init__(self, target: Any, *, prefix: str = "gradsieve") -> None:
        is_path = isinstance(target, str | PathLike)
        if not is_path and not hasattr(target, "add_scalar"):
            raise InputError(f"TensorBoard needs a log directory or a SummaryWriter, got {type(target).__name__}")
        self._writer: Any = None if is_path else target
        self._directory = str(target) if is_path else None
        self._make = _writer_class() if is_path else None
        self._prefix = prefix
        self._calls = 0  # the scalars' step: a skipped step and the one after it have the same `step`

    @override
    def open(self, rank: int) -> None:
        if self._make is not None:
            self._writer = self._make(self._directory)

    @override
    def write(self, stats: Stats) -> None:
        assert stats.last is not None
        for name, value in stats.last.as_dict().items():
            if name != "step":
                self._writer.add_scalar(f"{self._prefix}/{name}", float(value), self._calls)
        self._calls += 1
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._make is not None and self._writer is not None:
            self._writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({self._directory or self._writer!r})"


class Sinks:
    """All sinks of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Open a sink, if this rank writes to it."""
        if not isinstance(sink, Sink):
            raise InputError(f"rank {self._rank}: a sink must be a gradsieve.Sink, got {type(sink).__name__}")
        if self._rank == 0 or sink.every_rank:
            sink.open(self._rank)
            self._open.append(sink)

    def __bool__(self) -> bool:
        return bool(self._open)

    def write(self, stats: Stats) -> None:
        """Write a step to all sinks. Never raises."""
        for sink in tuple(self._open):
            try:
                sink.write(stats)
            except Exception as error:
                self._open.remove(sink)
                self._complain(sink, error)
                self._close(sink)

    def close(self) -> None:
        """Close all sinks. Never raises."""
        while self._open:
            self._close(self._open.pop())

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            self._complain(sink, error)

    def _complain(self, sink: Sink, error: Exception) -> None:
        logging.getLogger("gradsieve").error(
            "rank %d: %r failed and gets no more steps; training goes on: %s: %s",
            self._rank,
            sink,
            type(error).__name__,
            error,
        )


def _writer_class() -> Any:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return import_module(module).SummaryWriter
        except ImportError:
            continue
    raise InputError(
        "TensorBoard needs a package that is not installed: pip install tensorboard (or tensorboardX), "
        "or write JSON lines with gradsieve.JsonLines"
    )
