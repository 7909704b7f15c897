"""Exchange of optimizer updates: each rank's optimizer steps on its own gradient, and the ranks exchange the updates.

Each rank trains a local model, which is the shared model minus this rank's residual.
1. Forward and backward run on the local model, so a rank sees the effect of its own undelivered updates at once.
2. The rank's optimizer moves the local model. The distance is added to the residual.
3. Residuals are exchanged by a recipe. The delivered mean moves the shared model, on all ranks alike.
So the mean of all local models moves exactly by the mean of all updates, whenever they are delivered.

Why: error feedback before an optimizer delays gradients. Directions of strong curvature do not tolerate delay, and Adam
does not commute with it. Here no update is delayed for the rank that computed it (`docs/optimizers.md`).
"""

from gradsieve.updates.engine import UpdateEngine, for_updates
from gradsieve.updates.model import LocalModel
from gradsieve.updates.outer import DILOCO, SPARSELOCO, Outer
from gradsieve.updates.sieve import UpdateSieve, bind

__all__ = ["DILOCO", "SPARSELOCO", "LocalModel", "Outer", "UpdateEngine", "UpdateSieve", "bind", "for_updates"]
