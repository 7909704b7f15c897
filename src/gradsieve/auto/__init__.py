"""Choosing how to exchange from measured times: on a fast network a dense exchange wins, on a slow one a sparse one."""

from gradsieve.auto.choice import Choice
from gradsieve.auto.chooser import Candidate, Chooser
from gradsieve.auto.timing import Timing

__all__ = ["Candidate", "Choice", "Chooser", "Timing"]
