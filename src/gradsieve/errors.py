"""Exceptions, one type per cause, so that callers can tell causes apart."""

from __future__ import annotations


class GradsieveError(Exception):
    """Base class of every exception that this library raises on purpose.

    Example:
        >>> import gradsieve
        >>> try:
        ...     gradsieve.Constant(2.0)
        ... except gradsieve.GradsieveError as error:
        ...     print(error)
        density must be in (0, 1], got 2.0
    """


class InputError(GradsieveError, ValueError):
    """An argument is not allowed. The message gives its value and what is allowed."""


class UnknownNameError(InputError, LookupError):
    """A name is not in a registry. The message suggests the nearest name and lists the allowed ones."""


class MismatchError(GradsieveError, ValueError):
    """Ranks that must agree do not. The message names the ranks that differ, and the setting."""


class ReplicaError(MismatchError):
    """Ranks no longer have the same parameters. The message names the ranks and the first parameter that differ.

    Args:
        text: The message.
        ranks: The ranks that differ from the majority; all ranks if no state has a majority.
        parameter: The name of the first parameter that differs.
    """

    def __init__(self, text: str = "", *, ranks: tuple[int, ...] = (), parameter: str | None = None) -> None:
        super().__init__(text)
        self.ranks = ranks
        self.parameter = parameter


class MessageError(GradsieveError, ValueError):
    """A message from a peer is malformed. No part of it was used."""


class PeerLostError(GradsieveError, RuntimeError):
    """A peer died, left, or did not answer within the timeout.

    Args:
        text: The message.
        peer: The rank that was lost; None if it is unknown which.
        phase: The phase of the exchange: scatter, gather, all_reduce and so on.
        group: The number of the parameter group that was exchanged.
    """

    def __init__(
        self, text: str = "", *, peer: int | None = None, phase: str | None = None, group: int | None = None
    ) -> None:
        super().__init__(text)
        self.peer = peer
        self.phase = phase
        self.group = group

    def __str__(self) -> str:
        text = super().__str__()
        where = f"in phase {self.phase}"
        return text if self.phase is None or where in text else f"{text}, {where}"


class ExchangeError(GradsieveError, RuntimeError):
    """An exchange failed for a reason without a type of its own. The message says where, `__cause__` says why."""
