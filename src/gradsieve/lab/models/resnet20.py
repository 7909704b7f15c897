"""ResNet-20 for small images (He et al., 2016, section 4.2): three stages of 16, 32 and 64 channels.

A stage has `blocks` pairs of 3x3 convolutions. Where channels double, the shortcut takes every second pixel and pads
the new channels with zeros (the paper's option A), so it has no parameters. The model has 269,722; the variant with 1x1
convolutions in its shortcuts has 272,474.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.lab.models.shape import init_convolutions


@dataclass(frozen=True)
class ResNet20Shape:
    """Blocks, width, input channels and classes. The depth is 6 * blocks + 2."""

    blocks: int = 3  # per stage: 3 is ResNet-20, 1 is ResNet-8
    width: int = 16  # wider learns more; time and parameters grow with its square
    channels: int = 3
    classes: int = 10


class ResNet20(nn.Module):
    """Maps images to class scores."""

    def __init__(self, shape: ResNet20Shape) -> None:
        super().__init__()
        width = shape.width
        layers: list[nn.Module] = [_convolution(shape.channels, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        before = width
        for stage in range(3):
            after = width << stage
            for block in range(shape.blocks):
                layers.append(_Block(before, after, stride=2 if stage > 0 and block == 0 else 1))
                before = after
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, shape.classes)
        init_convolutions(self)

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, after - before
        self.first, self.first_norm = _convolution(before, after, stride), nn.BatchNorm2d(after)
        self.second, self.second_norm = _convolution(after, after, 1), nn.BatchNorm2d(after)

    @override
    def forward(self, images: Tensor) -> Tensor:
        added = functional.relu(self.first_norm(self.first(images)))
        added = self.second_norm(self.second(added))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.padding))
        return functional.relu(added + shortcut)


def _convolution(before: int, after: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
