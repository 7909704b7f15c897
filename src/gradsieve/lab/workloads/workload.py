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
    """A preset's recipe, density and periods."""

    recipe: str = "oktopk"
    density: float = 0.02  # share of entries that is sent; higher is closer to dense, and slower
    warmup: tuple[float, ...] = ()  # densities of the first epochs, one per epoch
    threshold_every: int = 32  # Ok-Topk: steps between exact local thresholds; longer saves passes over memory
    repartition_every: int = 64  # Ok-Topk: steps between new cuts of the regions; shorter adapts faster

    def __post_init__(self) -> None:
        for density in (self.density, *self.warmup):
            if not 0 < density <= 1:
                raise InputError(f"density must be in (0, 1], got {density}")

    def density_at(self, epoch: int) -> float:
        """The density in this epoch."""
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
    data: Any  # the task's data settings: source, and the form of samples
    batch: int  # samples per rank and step
    epochs: float  # may be a fraction
    optimizer: OptimizerSetting
    schedule: RateSchedule = field(default_factory=Steps)
    sieve: Sieve = field(default_factory=Sieve)
    clip_norm: float | None = None  # gradients are clipped to this norm; None is never
    note: str = ""  # where the settings come from

    def rate(self, progress: float) -> float:
        """The learning rate after `progress` epochs."""
        return self.optimizer.rate * self.schedule.factor(min(1.0, progress / self.epochs))


class Limits(NamedTuple):
    """Maximum number of samples; None is all."""

    train: int | None = None
    test: int | None = None


ALL = Limits()
PUBLISHED = "batch, optimizer, schedule, density and periods of the Ok-Topk paper"
PARTLY = "density and its warm-up from the gTop-k paper; learning rate, schedule and epochs as usual for the model"
SMALL = "chosen here, to learn within minutes on two cores"
SHAPE_ONLY = "the published model; data, optimizer and schedule chosen here, not tried"
MEDIUM = "chosen here, for a model in a published size, for races on slow links"
GTOPK = Sieve("gtopk", density=0.001, warmup=(0.015625, 0.004))


def presets(**named: Preset) -> Registry[Preset]:
    return Registry("preset", named)


Open = Callable[[Architecture[Any], Preset, Path | None, Limits], "Task[Any]"]


@dataclass(frozen=True)
class Workload:
    """One of the papers' tasks: a model, data sources and presets."""

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
        """The named preset, with another data source, another scored part, or other values of its fields."""
        chosen = replace(self.presets[name], **changes)
        if evaluate not in self.evaluates:
            raise InputError(f"{self.name} can only be evaluated on {' or '.join(self.evaluates)}, got {evaluate!r}")
        if evaluate != "test":
            chosen = replace(chosen, data=replace(chosen.data, evaluate=evaluate))
        if source is None:
            return chosen
        if source not in self.sources:
            raise unknown_source(source, self.sources)
        return replace(chosen, data=replace(chosen.data, source=source))

    def open(self, preset: Preset | str = "default", path: Path | None = None, limits: Limits = ALL) -> Task[Any]:
        """Read the data and return the task. `path` is the folder of the user's own data, if the source needs one."""
        chosen = self.preset(preset) if isinstance(preset, str) else preset
        return self.open_task(MODELS[self.model], chosen, path, limits)


def unknown_source(source: str, allowed: tuple[str, ...]) -> UnknownNameError:
    """The error that a registry of the allowed sources raises."""
    try:
        Registry("source of data", dict.fromkeys(allowed))[source]
    except UnknownNameError as error:
        return error
    raise AssertionError(f"{source} is allowed")
