"""Image classification: cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.lab.data.folder import FolderPair, read_folder
from gradsieve.lab.data.images import ImageBatch, ImagePair, read_cifar, read_digits, read_plain_digits
from gradsieve.lab.data.subset import first
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.optimizer import Sgd
from gradsieve.lab.workloads.schedule import Cosine, Steps
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task
from gradsieve.lab.workloads.workload import (
    GTOPK,
    PARTLY,
    PUBLISHED,
    SHAPE_ONLY,
    SMALL,
    Limits,
    Preset,
    Workload,
    presets,
    unknown_source,
)

SOURCES = ("digits", "cifar10", "imagenet")
CIFAR_STEPS = Steps(warmup=10 / 161, milestones=(81 / 161, 122 / 161, 155 / 161))
IMAGENET_STEPS = Steps(warmup=5 / 90, milestones=(30 / 90, 60 / 90, 80 / 90))


@dataclass(frozen=True)
class ImageData:
    """The source of images and their size."""

    source: str = "digits"
    side: int = 32  # pixels after resizing; time grows with its square

    def read(self, path: Path | None) -> ImagePair | FolderPair:
        """The training and the test part."""
        match self.source:
            case "digits":
                return read_digits(self.side)
            case "cifar10":
                return read_cifar(self.side, path)
            case "imagenet":
                return read_folder(path, self.side)
        raise unknown_source(self.source, SOURCES)


@dataclass(frozen=True)
class PlainDigits:
    """The digits without random shifts, which a short run learns from most quickly."""

    side: int = 8  # pixels after resizing
    source: str = "digits"
    evaluate: str = "test"  # or "validation", for tuning

    def read(self, path: Path | None) -> ImagePair:
        """The training and the scored part."""
        return read_plain_digits(self.side, self.evaluate)


@dataclass(frozen=True, eq=False)
class Classification(Task[ImageBatch]):
    """Predicts the class of an image."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", True, "{:.1%}"), Metric("loss", False))
    num_sums: ClassVar[int] = 3

    @override
    def loss(self, model: nn.Module, batch: Drawn[ImageBatch], carry: Any = None) -> Outcome:
        return Outcome(functional.cross_entropy(model(batch.data.images), batch.data.labels))

    @override
    def tally(self, model: nn.Module, data: ImageBatch) -> Tensor:
        """Number of images, of correct ones, and the sum of the cross entropy."""
        scores = model(data.images)
        correct = (scores.argmax(1) == data.labels).sum()
        total = functional.cross_entropy(scores, data.labels, reduction="sum")
        return torch.stack([torch.tensor(len(data.labels)), correct.cpu(), total.cpu()]).double()

    @override
    def scores(self, sums: Tensor) -> Mapping[str, float]:
        count, correct, total = sums.tolist()
        return {"accuracy": correct / count, "loss": total / count}


def open_classification(
    architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits
) -> Classification:
    """Read the images, and build the task for their channels and classes."""
    pair = preset.data.read(path)
    shape = architecture.shape(preset.size, channels=pair.channels, classes=pair.classes)
    train, test = first(pair.train, limits.train), first(pair.test, limits.test)
    return Classification(train, test, architecture, shape, preset.batch)


def _small(rate: float, side: int, epochs: int = 12) -> Preset:
    sgd = Sgd(rate, momentum=0.9, weight_decay=5e-4)
    return Preset("small", ImageData("digits", side), 16, epochs, sgd, Cosine(0.1), note=SMALL)


def _on_cifar(preset: Preset) -> Preset:
    """The same small model on CIFAR-10, which is harder."""
    return replace(preset, data=replace(preset.data, source="cifar10"), batch=32, epochs=10)


def _workload(model: str, small: Preset, paper: Preset, sources: tuple[str, ...]) -> Workload:
    chosen = presets(default=small, cifar10=_on_cifar(small), paper=paper)
    return Workload(model, "classifies images", model, sources, chosen, open_classification)


VGG16 = _workload(
    "vgg16",
    _small(0.05, side=32),
    Preset("paper", ImageData("cifar10"), 16, 161, Sgd(0.1, 0.9, 1e-4), CIFAR_STEPS, note=PUBLISHED),
    sources=("digits", "cifar10"),
)
RESNET20 = _workload(
    "resnet20",
    _small(0.1, side=16),
    Preset("paper", ImageData("cifar10"), 32, 161, Sgd(0.1, 0.9, 1e-4), CIFAR_STEPS, GTOPK, note=PARTLY),
    sources=("digits", "cifar10"),
)
RESNET50 = _workload(
    "resnet50",
    _small(0.05, side=64),
    Preset("paper", ImageData("imagenet", 224), 32, 90, Sgd(0.1, 0.9, 1e-4), IMAGENET_STEPS, GTOPK, note=PARTLY),
    sources=SOURCES,
)
ALEXNET = _workload(
    "alexnet",
    _small(0.02, side=64),
    Preset("paper", ImageData("imagenet", 224), 64, 90, Sgd(0.01, 0.9, 5e-4), IMAGENET_STEPS, GTOPK, note=PARTLY),
    sources=SOURCES,
)
MLP = Workload(
    "mlp",
    "classifies images",
    "mlp",
    ("digits",),
    presets(
        default=Preset("small", PlainDigits(), 32, 4, Sgd(0.3, momentum=0.9), Cosine(0.05), note=SMALL),
        paper=Preset("paper", PlainDigits(29), 32, 50, Sgd(0.05, momentum=0.9), Cosine(0.05), note=SHAPE_ONLY),
    ),
    open_classification,
    evaluates=("test", "validation"),
)
