"""Choosing how to exchange from measured times: on a fast network a dense exchange wins, on a slow one a sparse one."""

from gradsieve.auto.chooser import Candidate, Chooser
from gradsieve.auto.decision import Decision
from gradsieve.auto.timing import Timing

__all__ = ["Candidate", "Chooser", "Decision", "Timing"]
