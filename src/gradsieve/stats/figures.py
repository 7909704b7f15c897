"""What was sent, what became of it and how long it took, counted: of every step, and in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from gradsieve.comm import Traffic


@dataclass
class Seconds:
    """Where the time of an exchange went, on the thread that does it; each moment counts once."""

    select: float = 0.0  # adding what is owed to the gradient, clipping, picking
    encode: float = 0.0  # entries to messages
    communicate: float = 0.0  # inside calls of the network: sending, and waiting for peers
    decode: float = 0.0  # messages to entries, and checking them
    reduce: float = 0.0  # the rest of the reduction: adding, cutting, splitting
    settle: float = 0.0  # what is owed from now on, and writing means back

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))

    def add_(self, other: Seconds) -> None:
        """Add another's, phase by phase."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True)
class StepStats:
    """One step on one rank."""

    step: int  # how many steps had counted before it
    counted: bool  # False: something was not finite, and all ranks left their state as it was
    joined: bool  # this rank's own inputs had ended
    dense: bool  # everything was sent
    sparse_numel: int  # entries of the groups that are sent sparsely
    selected_entries: int  # of these, picked by this rank; none if the step did not count
    delivered_entries: int  # of these, in the totals all ranks got; none if the step did not count
    dense_bytes: int  # what a dense all_reduce of all groups would have sent
    traffic: Traffic
    seconds: Seconds

    def as_dict(self) -> dict[str, int | float | bool]:
        """All figures by name, in one level: `bytes_sent`, `select_seconds`, ..."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("traffic", "seconds")}
        return own | _flat(self.traffic, self.seconds)


@dataclass
class Stats:
    """Totals of one rank since it was attached; they are not part of a checkpoint."""

    steps: int = 0  # that counted
    skipped_steps: int = 0  # something was not finite: all ranks left their state as it was
    joined_steps: int = 0  # taken part in after this rank's own inputs had ended
    dense_steps: int = 0  # in which everything was sent
    selected_entries: int = 0  # picked by this rank, of the groups that are sent sparsely
    delivered_entries: int = 0  # in the totals all ranks got, of the groups that are sent sparsely
    dense_bytes: int = 0  # what a dense all_reduce would have sent in the same steps
    buffer_bytes: int = 0  # that DDP broadcasts by itself at every forward pass (batch norm); in no other figure
    traffic: Traffic = field(default_factory=Traffic)  # messages and bytes
    seconds: Seconds = field(default_factory=Seconds)  # by phase
    last: StepStats | None = None  # the step before now

    def record(self, step: StepStats) -> None:
        """Add a step. Its traffic is not added: `traffic` is the comm's own, and grows by itself."""
        self.steps += step.counted
        self.skipped_steps += not step.counted
        self.joined_steps += step.joined
        self.dense_steps += step.counted and step.dense
        self.selected_entries += step.selected_entries
        self.delivered_entries += step.delivered_entries
        self.dense_bytes += step.dense_bytes
        self.seconds.add_(step.seconds)
        self.last = step

    def as_dict(self) -> dict[str, int | float | bool]:
        """All totals by name, in one level: `bytes_sent`, `select_seconds`, ..."""
        apart = ("traffic", "seconds", "last")
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return own | _flat(self.traffic, self.seconds)


def _flat(traffic: Traffic, seconds: Seconds) -> dict[str, int | float | bool]:
    return asdict(traffic) | {f"{phase}_seconds": value for phase, value in asdict(seconds).items()}
