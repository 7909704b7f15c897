"""What goes wrong with networks."""

from gradsieve.errors import GradsieveError


class NetworkError(GradsieveError, RuntimeError):
    """The laboratory's network could not be built, used or removed; the sentence says why and what helps."""
