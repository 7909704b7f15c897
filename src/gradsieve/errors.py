"""What can go wrong, one type a cause, so that callers can tell them apart."""

from __future__ import annotations


class GradsieveError(Exception):
    """Anything this library raises on purpose."""


class InputError(GradsieveError, ValueError):
    """An argument is outside what is allowed; the sentence says what came and what is allowed."""


class UnknownNameError(InputError, LookupError):
    """A name is not in a registry; the sentence gives the nearest ones."""


class MismatchError(GradsieveError, ValueError):
    """Ranks that must agree do not; the sentence names who differs in what."""


class ReplicaError(MismatchError):
    """Ranks no longer have the same parameters; the sentence names who differs, and where first."""

    def __init__(self, text: str = "", *, ranks: tuple[int, ...] = (), parameter: str | None = None) -> None:
        super().__init__(text)
        self.ranks = ranks  # that differ from most; all of them if no state has a majority
        self.parameter = parameter  # the first that is not the same


class MessageError(GradsieveError, ValueError):
    """What arrived from a peer is not a well formed message; nothing of it was used."""


class PeerLostError(GradsieveError, RuntimeError):
    """A peer died, left, or did not answer within the timeout."""

    def __init__(
        self, text: str = "", *, peer: int | None = None, phase: str | None = None, group: int | None = None
    ) -> None:
        super().__init__(text)
        self.peer = peer  # the rank that was lost; None if it is not known which
        self.phase = phase  # of the exchange: scatter, gather, all_reduce, ...
        self.group = group  # of parameters

    def __str__(self) -> str:
        text = super().__str__()
        place = f"in phase {self.phase}"
        return text if self.phase is None or place in text else f"{text}, {place}"


class ExchangeError(GradsieveError, RuntimeError):
    """An exchange failed for a reason that has no type of its own; the sentence says where, the cause says why."""
