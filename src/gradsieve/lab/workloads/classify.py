"""Pictures to classes: cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsieve.lab.data.folder import FolderPair, read_folder
from gradsieve.lab.data.images import ImageBatch, ImagePair, read_cifar, read_digits
from gradsieve.lab.models import Architecture
from gradsieve.lab.workloads.task import Drawn, Metric, Outcome, Task, first
from gradsieve.lab.workloads.workload import Limits, Preset, unknown_source

SOURCES = ("digits", "cifar10", "imagenet")


@dataclass(frozen=True)
class ImageData:
    """Which pictures, and how large they are made."""

    source: str = "digits"
    side: int = 32  # pixels; time grows with its square

    def read(self, path: Path | None) -> ImagePair | FolderPair:
        """Both parts."""
        match self.source:
            case "digits":
                return read_digits(self.side)
            case "cifar10":
                return read_cifar(self.side, path)
            case "imagenet":
                return read_folder(path, self.side)
        raise unknown_source(self.source, SOURCES)


@dataclass(frozen=True, eq=False)
class Classification(Task[ImageBatch]):
    """Which class a picture is of."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", True, "{:.1%}"), Metric("loss", False))
    num_sums: ClassVar[int] = 3

    def loss(self, model: nn.Module, batch: Drawn[ImageBatch], carry: Any = None) -> Outcome:
        """Cross entropy."""
        return Outcome(functional.cross_entropy(model(batch.data.images), batch.data.labels))

    def tally(self, model: nn.Module, data: ImageBatch) -> Tensor:
        """Pictures, those told rightly, cross entropy."""
        scores = model(data.images)
        right = (scores.argmax(1) == data.labels).sum()
        total = functional.cross_entropy(scores, data.labels, reduction="sum")
        return torch.stack([torch.tensor(len(data.labels)), right.cpu(), total.cpu()]).double()

    def scores(self, sums: Tensor) -> Mapping[str, float]:
        """Share of pictures told rightly, and mean cross entropy."""
        count, right, total = sums.tolist()
        return {"accuracy": right / count, "loss": total / count}


def open_classification(
    architecture: Architecture[Any], preset: Preset, path: Path | None, limits: Limits
) -> Classification:
    """With as many channels and classes as the pictures have."""
    pair = preset.data.read(path)
    shape = architecture.shape(preset.size, channels=pair.channels, classes=pair.classes)
    train, test = first(pair.train, limits.train), first(pair.test, limits.test)
    return Classification(train, test, architecture, shape, preset.batch)
