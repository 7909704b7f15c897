"""Exchange of optimizer updates: each rank's optimizer steps on its own gradient, and the ranks exchange the steps.

Every rank trains a local model, which is the shared model minus this rank's residual:
1. forward and backward run on the local model, so a rank sees the effect of its own undelivered updates at once;
2. the rank's optimizer moves the local model, and the distance it moved is added to the residual;
3. residuals are exchanged by a recipe; the delivered mean moves the shared model, on all ranks alike.
The mean of all local models therefore moves exactly as far as the mean of all updates, whatever is delivered when.

Why: error feedback in front of an optimizer delays gradients. Directions of strong curvature do not bear delay, and
Adam does not commute with it. Here nothing is delayed for the rank that computed it (`docs/optimizers.md`).
"""

from gradsieve.updates.engine import UpdateEngine, for_updates
from gradsieve.updates.model import LocalModel
from gradsieve.updates.outer import DILOCO, SPARSELOCO, Outer
from gradsieve.updates.sieve import UpdateSieve, bind

__all__ = ["DILOCO", "SPARSELOCO", "LocalModel", "Outer", "UpdateEngine", "UpdateSieve", "bind", "for_updates"]
