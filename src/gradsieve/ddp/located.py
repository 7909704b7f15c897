"""Errors of an exchange that name rank, step and group."""

from __future__ import annotations

import contextlib

from gradsieve.engine import Engine
from gradsieve.errors import ExchangeError, GradsieveError, PeerLostError, ReplicaError

SHOWN_NAMES = 4  # parameters of a group that an error message lists


def located(error: BaseException, engine: Engine, index: int | None, whole: str = "comparison") -> BaseException:
    """Return an error of the same type that names rank, step and group; `index` None is all groups, and `whole` what
    failed for them."""
    if index is None and isinstance(error, ReplicaError):
        return error  # it names the ranks itself
    text = f"rank {engine.comm.rank}: step {engine.steps_done}, {_where(engine, index, whole)} failed: {error}"
    located: GradsieveError = ExchangeError(text)
    if isinstance(error, GradsieveError):
        with contextlib.suppress(TypeError):  # a user's type may have another constructor
            located = type(error)(text)
    if isinstance(error, PeerLostError) and isinstance(located, PeerLostError):
        located.peer, located.phase, located.group = error.peer, error.phase, index
    located.__cause__ = error
    return located


def _where(engine: Engine, index: int | None, whole: str) -> str:
    if index is None:
        return f"all parameters: their {whole}"
    names = engine.groups[index].names
    shown = ", ".join(names[:SHOWN_NAMES]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else "")
    return f"group {index} of {len(engine.groups)}, parameters {shown}: the exchange"
