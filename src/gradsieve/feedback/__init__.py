"""Error feedback: undelivered entries are added to the next gradient.

Each form keeps a spare vector for each vector of its state. A step writes to the spare vectors only, and in the new
state the two are swapped. So the old state stays valid, and to keep it is to undo the step.
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
