"""VGG-16 for small images: thirteen convolutions with batch norm and one fully connected layer.

Simonyan and Zisserman, 2015, in the form that the Ok-Topk and gTop-k papers train on CIFAR-10: 3x3 convolutions with a
bias, each followed by batch norm. Five poolings reduce 32x32 to 1x1, and one linear layer maps 512 features to the
classes. Parameters: 14,714,688 in convolutions, 8,448 in norms, 5,130 in the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from gradsieve.lab.models.shape import init_convolutions

STAGES = (
    (1, 2),
    (2, 2),
    (4, 3),
    (8, 3),
    (8, 3),
)  # (multiple of the width, number of convolutions), then a pooling


@dataclass(frozen=True)
class VggShape:
    """Width, input channels and classes."""

    width: int = 64  # wider learns more; time and parameters grow with its square
    channels: int = 3
    classes: int = 10


class Vgg16(nn.Module):
    """Maps images of at least 32x32 pixels to class scores."""

    def __init__(self, shape: VggShape) -> None:
        super().__init__()
        self.features = nn.Sequential(*_layers(shape), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(STAGES[-1][0] * shape.width, shape.classes)
        init_convolutions(self)

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


def _layers(shape: VggShape) -> Iterator[nn.Module]:
    channels = shape.channels
    for factor, depth in STAGES:
        for _ in range(depth):
            yield nn.Conv2d(channels, factor * shape.width, 3, padding=1)
            channels = factor * shape.width
            yield nn.BatchNorm2d(channels)
            yield nn.ReLU(inplace=True)
        yield nn.MaxPool2d(2)
