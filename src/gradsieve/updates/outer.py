"""What becomes of an exchanged mean: a rate, a momentum, and how much of a residual is kept.

DiLoCo (Douillard et al., 2023) exchanges the distance of H local steps densely and gives it to SGD with Nesterov
momentum. SparseLoCo (2025) sends its largest entries with error feedback that decays, and lets every rank start its
local steps from the shared model. The default is neither: the mean moves the shared model as far as it says, and local
models go on from where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsieve.errors import InputError


@dataclass(frozen=True)
class Outer:
    """How the shared model follows the delivered mean."""

    local_steps: int = 1  # optimizer steps from exchange to exchange; more sends less, and lets local models part
    rate: float = 1.0  # of the mean that moves the shared model; more follows faster
    momentum: float = 0.0  # Nesterov's, over exchanges; more smooths over more of them
    decay: float = 1.0  # share of the residual that is kept after an exchange; less forgets sooner
    ahead: bool = True  # whether local models include the residual; False: all start from the shared model

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise InputError(f"local_steps must be at least 1, got {self.local_steps}")
        if not self.rate > 0:
            raise InputError(f"the outer rate must be positive, got {self.rate}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"the outer momentum must be in [0, 1), got {self.momentum}")
        if not 0 <= self.decay <= 1:
            raise InputError(f"the decay of residuals must be in [0, 1], got {self.decay}")

    def every(self, local_steps: int | None) -> Outer:
        """With another number of local steps; None is as it is."""
        return self if local_steps is None else replace(self, local_steps=local_steps)


DILOCO = Outer(local_steps=100, rate=0.7, momentum=0.9)
"""The published setting, to be used with recipe "dense"; local_steps from 30 to 500."""

SPARSELOCO = Outer(local_steps=30, decay=0.95, ahead=False)
"""The published setting, to be used with recipe "sparseloco" at density 1 / 64; local_steps from 15 to 100."""
