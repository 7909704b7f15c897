"""The error of the network laboratory."""

from gradsieve.errors import GradsieveError


class NetworkError(GradsieveError, RuntimeError):
    """The laboratory's network could not be built, used or removed; the message says why, and the remedy."""
