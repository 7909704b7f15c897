"""The outer step: how the delivered mean moves the shared model, and how much of a residual is kept.

DiLoCo (Douillard et al., 2023, https://arxiv.org/abs/2311.08105) exchanges the distance of H local steps densely and
gives it to SGD with Nesterov momentum. SparseLoCo (Sarfi et al., 2025, https://arxiv.org/abs/2508.15706) sends its
largest entries with error feedback that decays, and each rank starts its local steps from the shared model. The default
is neither: the delivered mean moves the shared model, and the local models continue from where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsieve.errors import InputError


@dataclass(frozen=True)
class Outer:
    """How the shared model follows the delivered mean.

    Args:
        local_steps: Optimizer steps per exchange. More sends less, and lets local models move apart.
        rate: The outer learning rate: the shared model moves by this multiple of the mean. More follows faster.
        momentum: Nesterov momentum over exchanges. More smooths over more of them.
        decay: Fraction of the residual that is kept after an exchange. Less forgets sooner.
        ahead: Whether local models include the residual. If False, all start from the shared model.

    Raises:
        InputError: A value is outside its range.

    Example:
        >>> from gradsieve import DILOCO, Outer
        >>> DILOCO
        Outer(local_steps=100, rate=0.7, momentum=0.9, decay=1.0, ahead=True)
        >>> Outer(local_steps=8).every(4).local_steps
        4
    """

    local_steps: int = 1
    rate: float = 1.0
    momentum: float = 0.0
    decay: float = 1.0
    ahead: bool = True

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
        """Return these settings with another number of local steps.

        Args:
            local_steps: Optimizer steps per exchange; None keeps the number.
        """
        return self if local_steps is None else replace(self, local_steps=local_steps)


DILOCO = Outer(local_steps=100, rate=0.7, momentum=0.9)
"""The published outer settings of DiLoCo, for recipe "dense" and 30 to 500 local steps."""

SPARSELOCO = Outer(local_steps=30, decay=0.95, ahead=False)
"""The published outer settings of SparseLoCo, for recipe "sparseloco", density 1 / 64 and 15 to 100 local steps."""
