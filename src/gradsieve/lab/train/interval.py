"""What a rank counts over some training steps: loss, seconds by phase, bytes and entries."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("data", "forward", "backward", "exchange", "update")
"""The phases of a step. `exchange` is the wait after the last gradient was computed; the rest overlaps backward."""


@dataclass
class Interval:
    """Sums over some steps of one rank."""

    steps: int = 0
    loss: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds
    bytes_received: int = 0  # payload; computed, not counted, for an all_reduce and for torch's hooks
    interface_bytes: int | None = None  # received by this rank's host, if it has its own
    selected: int = 0  # entries this rank selected
    delivered: int = 0  # entries all ranks received
    skipped: int = 0  # steps in which a value was not finite

    @property
    def seconds(self) -> float:
        """Sum over all phases."""
        return sum(self.phases.values())
