"""A named workload: a model, a task, and settings to train it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsieve.errors import InputError, UnknownNameError
from gradsieve.lab.models import MODELS, Architecture
from gradsieve.lab.workloads.optimizer import OptimizerSetting
from gradsieve.lab.workloads.schedule import RateSchedule, Steps
from gradsieve.recipes import Recipe, recipe
from gradsieve.reducers.oktopk import OkTopk
from gradsieve.registry import Registry
from gradsieve.selectors.threshold import Threshold

if TYPE_CHECKING:
    from gradsieve.lab.workloads.task import Task


@dataclass(frozen=True)
class Sieve:
    """What a preset exchanges by, unless the user says otherwise."""

    recipe: str = "oktopk"
    density: float = 0.02  # share of entries that is sent: more is closer to dense, and slower
    warmup: tuple[float, ...] = ()  # densities of the first epochs, one each
    threshold_every: int = 32  # Ok-Topk: steps between exact local thresholds; more saves passes
    repartition_every: int = 64  # Ok-Topk: steps between cuts of the regions; fewer follows moving gradients closer

    def __post_init__(self) -> None:
        for density in (self.density, *self.warmup):
            if not 0 < density <= 1:
                raise InputError(f"density must be in (0, 1], got {density}")

    def density_at(self, epoch: int) -> float:
        """In this epoch."""
        return self.warmup[epoch] if epoch < len(self.warmup) else self.density

    def build(self) -> Recipe:
        """The recipe with these periods."""
        if self.recipe != "oktopk":
            return recipe(self.recipe)
        return Recipe(Threshold(self.threshold_every), OkTopk(repartition_every=self.repartition_every))


@dataclass(frozen=True)
class Preset:
    """How to train a workload."""

    size: str  # of the model, see `Architecture.sizes`
    data: Any  # the task's own settings: source, and how samples are cut
    batch: int  # samples a worker and step
    epochs: float  # may be part of one: stop when so much is done
    optimizer: OptimizerSetting
    schedule: RateSchedule = field(default_factory=Steps)
    sieve: Sieve = field(default_factory=Sieve)
    clip_norm: float | None = None  # gradients longer than this are shortened to it; None never
    note: str = ""  # where it comes from

    def rate(self, progress: float) -> float:
        """The learning rate after so many epochs."""
        return self.optimizer.rate * self.schedule.factor(min(1.0, progress / self.epochs))


class Limits(NamedTuple):
    """At most so many samples; None for all."""

    train: int | None = None
    test: int | None = None


ALL = Limits()
PUBLISHED = "batch, optimizer, schedule, density and periods of the Ok-Topk paper"
PARTLY = "density and its warm-up from the gTop-k paper; rate, schedule and number of epochs as usual for the model"
SMALL = "chosen here to learn within minutes on two cores"
MEDIUM = "chosen here for a model in a size that others have published, to be raced on slow links"
GTOPK = Sieve("gtopk", density=0.001, warmup=(0.015625, 0.004))


def presets(**named: Preset) -> Registry[Preset]:
    """By name."""
    return Registry("preset", named)


Open = Callable[[Architecture[Any], Preset, Path | None, Limits], "Task[Any]"]


@dataclass(frozen=True)
class Workload:
    """One of the papers' tasks."""

    name: str
    description: str
    model: str  # in MODELS
    sources: tuple[str, ...]  # of data, see `gradsieve data list`
    presets: Registry[Preset]
    open_task: Open
    evaluates: tuple[str, ...] = ("test",)  # parts of the data that can be scored

    def preset(
        self, name: str = "default", source: str | None = None, evaluate: str = "test", **changes: Any
    ) -> Preset:
        """The named preset; source of data, the part to be scored, and any of its fields may be put in."""
        chosen = replace(self.presets[name], **changes)
        if evaluate not in self.evaluates:
            raise InputError(f"{self.name} can be evaluated on {' or '.join(self.evaluates)} only, got {evaluate!r}")
        if evaluate != "test":
            chosen = replace(chosen, data=replace(chosen.data, evaluate=evaluate))
        if source is None:
            return chosen
        if source not in self.sources:
            raise unknown_source(source, self.sources)
        return replace(chosen, data=replace(chosen.data, source=source))

    def open(self, preset: Preset | str = "default", path: Path | None = None, limits: Limits = ALL) -> Task[Any]:
        """Read the data, from `path` where the source is what the user has; ready to train."""
        chosen = self.preset(preset) if isinstance(preset, str) else preset
        return self.open_task(MODELS[self.model], chosen, path, limits)


def unknown_source(source: str, allowed: tuple[str, ...]) -> UnknownNameError:
    """In the words of a registry."""
    try:
        Registry("source of data", dict.fromkeys(allowed))[source]
    except UnknownNameError as error:
        return error
    raise AssertionError(f"{source} is allowed")
