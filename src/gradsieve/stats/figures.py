"""Statistics per step and in total: entries, bytes, messages and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from gradsieve.comm import Traffic


@dataclass
class Seconds:
    """The time of exchanges by phase, on the thread that exchanges. Each moment counts once.

    Attributes:
        select: Adding the residual to the gradient, clipping, selecting.
        encode: Making messages from entries.
        communicate: Calls of the network: sending, and waiting for peers.
        decode: Checking messages, and making entries from them.
        reduce: The rest of the reduction: adding, cutting, splitting.
        settle: Computing the new residual, and writing means.
    """

    select: float = 0.0
    encode: float = 0.0
    communicate: float = 0.0
    decode: float = 0.0
    reduce: float = 0.0
    settle: float = 0.0

    @property
    def total(self) -> float:
        """The sum over all phases."""
        return float(sum(asdict(self).values()))

    def add_(self, other: Seconds) -> None:
        """Add the seconds of another, phase by phase."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True)
class StepStats:
    """The statistics of one step on one rank.

    Attributes:
        step: The number of steps that counted before it.
        counted: Whether the step counted. False: a delivered entry was not finite, and no rank changed its state.
        joined: Whether this rank's own inputs had ended.
        dense: Whether all entries were sent.
        sparse_numel: Entries of the groups that are sent sparsely.
        selected_entries: Those of them that this rank selected; 0 if the step did not count.
        delivered_entries: Those of them that were delivered to all ranks; 0 if the step did not count.
        dense_bytes: Bytes that a dense all_reduce of all groups would have sent.
        traffic: Messages and bytes of this rank.
        seconds: Time by phase.
    """

    step: int
    counted: bool
    joined: bool
    dense: bool
    sparse_numel: int
    selected_entries: int
    delivered_entries: int
    dense_bytes: int
    traffic: Traffic
    seconds: Seconds

    def as_dict(self) -> dict[str, int | float | bool]:
        """Return all figures by name, in one level: `bytes_sent`, `select_seconds` and so on."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("traffic", "seconds")}
        return own | _flat(self.traffic, self.seconds)


@dataclass(frozen=True)
class Decided:
    """What recipe "auto" has decided, and the measurements that it is based on.

    Attributes:
        name: The recipe that exchanges now, or "dense".
        seconds_per_step: What was measured of each candidate: the part of a step that differs between them, on the
            slowest rank.
        not_tried: Candidates that could not win, and the seconds per step that their bytes alone would take.
    """

    name: str
    seconds_per_step: dict[str, float]
    not_tried: dict[str, float]

    def __str__(self) -> str:
        """The decision and its reasons, in one sentence without a full stop."""
        parts = [f"{name} takes {_shown(seconds)} per step" for name, seconds in self.seconds_per_step.items()]
        parts += [f"{name} was not tried: its bytes alone take {_shown(s)}" for name, s in self.not_tried.items()]
        return f"{self.name} ({', '.join(parts)})"


@dataclass
class Stats:
    """The totals of one rank since it was attached. They are not part of a checkpoint.

    Attributes:
        steps: Steps that counted.
        skipped_steps: Steps in which a delivered entry was not finite: no rank changed its state.
        joined_steps: Steps after this rank's own inputs had ended.
        dense_steps: Steps in which all entries were sent.
        selected_entries: Entries that this rank selected, of the groups that are sent sparsely.
        delivered_entries: Entries that were delivered to all ranks, of the groups that are sent sparsely.
        dense_bytes: Bytes that a dense all_reduce would have sent in the same steps.
        buffer_bytes: Bytes that DDP itself broadcasts at each forward pass (batch norm). In no other figure.
        traffic: Messages and bytes of this rank.
        seconds: Time by phase.
        last: The statistics of the last step; None before the first.
        decided: What recipe "auto" has decided; None with other recipes, and before the end of its first trial.

    Example:
        >>> import gradsieve
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
        >>> sieve.stats.steps
        0
        >>> sieve.stats.as_dict()["bytes_sent"]
        0
    """

    steps: int = 0
    skipped_steps: int = 0
    joined_steps: int = 0
    dense_steps: int = 0
    selected_entries: int = 0
    delivered_entries: int = 0
    dense_bytes: int = 0
    buffer_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    seconds: Seconds = field(default_factory=Seconds)
    last: StepStats | None = None
    decided: Decided | None = None

    def record(self, step: StepStats) -> None:
        """Add a step, except for its traffic: `traffic` is the comm's own, which grows by itself.

        Args:
            step: The statistics of the step.
        """
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
        """Return all totals by name, in one level: `bytes_sent`, `select_seconds` and so on."""
        apart = ("traffic", "seconds", "last", "decided")
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return own | _flat(self.traffic, self.seconds)


def _flat(traffic: Traffic, seconds: Seconds) -> dict[str, int | float | bool]:
    return asdict(traffic) | {f"{phase}_seconds": value for phase, value in asdict(seconds).items()}


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
