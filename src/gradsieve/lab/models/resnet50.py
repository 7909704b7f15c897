"""ResNet-50 for large images (He et al., 2016): four stages of 3, 4, 6 and 3 bottlenecks.

The stride is in the 3x3 convolution of a bottleneck, as is common today; the paper has it in the first 1x1. The number
of parameters is the same, 25,557,032 with 1,000 classes. The last norm of a bottleneck is initialized to zero, so that
an untrained model acts as a shallow one and learns from the start (Goyal et al., 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradsieve.lab.models.shape import init_convolutions

EXPANSION = 4  # ratio of a bottleneck's outer to its inner channels


@dataclass(frozen=True)
class ResNet50Shape:
    """Depth, width, input channels and classes."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # bottlenecks per stage
    width: int = 64  # inner channels of the first stage; wider learns more; time grows with its square
    channels: int = 3
    classes: int = 1000


class ResNet50(nn.Module):
    """Maps images to class scores."""

    def __init__(self, shape: ResNet50Shape) -> None:
        super().__init__()
        width = shape.width
        layers: list[nn.Module] = [
            nn.Conv2d(shape.channels, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        before = width
        for stage, depth in enumerate(shape.blocks):
            for block in range(depth):
                layers.append(_Bottleneck(before, width << stage, stride=2 if stage > 0 and block == 0 else 1))
                before = (width << stage) * EXPANSION
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, shape.classes)
        init_convolutions(self)
        for module in self.modules():
            if isinstance(module, _Bottleneck):
                nn.init.zeros_(module.expand_norm.weight)

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


class _Bottleneck(nn.Module):
    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = inner * EXPANSION
        self.reduce = nn.Conv2d(before, inner, 1, bias=False)
        self.middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.expand = nn.Conv2d(inner, after, 1, bias=False)
        self.reduce_norm, self.middle_norm = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner)
        self.expand_norm = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            project = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(after))

    @override
    def forward(self, images: Tensor) -> Tensor:
        added = functional.relu(self.reduce_norm(self.reduce(images)))
        added = functional.relu(self.middle_norm(self.middle(added)))
        added = self.expand_norm(self.expand(added))
        return functional.relu(added + self.shortcut(images))
