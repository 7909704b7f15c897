"""Error feedback: what was not delivered is added to the next gradient.

Each form keeps a spare for every vector it remembers. A step writes to the spares only, and the state it ends in has
the two changed places: the state before it stays whole, and whoever holds on to it has undone the step.
"""

from gradsieve.feedback.base import Accumulated, Feedback
from gradsieve.feedback.momentum import MomentumResidual, MomentumState
from gradsieve.feedback.none import NoFeedback, NothingKept
from gradsieve.feedback.residual import Residual, ResidualState

__all__ = [
    "Accumulated",
    "Feedback",
    "MomentumResidual",
    "MomentumState",
    "NoFeedback",
    "NothingKept",
    "Residual",
    "ResidualState",
]
