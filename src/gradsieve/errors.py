"""What can go wrong, one type a cause, so that callers can tell them apart."""


class GradsieveError(Exception):
    """Anything this library raises on purpose."""


class InputError(GradsieveError, ValueError):
    """An argument is outside what is allowed; the sentence says what came and what is allowed."""


class UnknownNameError(InputError, LookupError):
    """A name is not in a registry; the sentence gives the nearest ones."""


class MismatchError(GradsieveError, ValueError):
    """Ranks that must agree do not; the sentence names who differs in what."""


class MessageError(GradsieveError, ValueError):
    """What arrived from a peer is not a well formed message; nothing of it was used."""


class PeerLostError(GradsieveError, RuntimeError):
    """A peer died, left, or did not answer within the timeout."""


class ExchangeError(GradsieveError, RuntimeError):
    """An exchange failed for a reason that has no type of its own; the sentence says where, the cause says why."""
