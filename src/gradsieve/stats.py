"""What was sent and what became of it, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsieve.comm import Traffic


@dataclass
class Stats:
    """Totals of one rank since it was attached; they are not part of a checkpoint."""

    steps: int = 0  # that counted
    skipped_steps: int = 0  # something was not finite: all ranks left their state as it was
    joined_steps: int = 0  # taken part in after this rank's own inputs had ended
    dense_steps: int = 0  # in which everything was sent
    selected_entries: int = 0  # picked by this rank, of the groups that are sent sparsely
    delivered_entries: int = 0  # in the totals all ranks got, of the groups that are sent sparsely
    traffic: Traffic = field(default_factory=Traffic)  # messages and bytes
