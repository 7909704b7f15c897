"""A multilayer perceptron for small images (Cireşan et al., 2010, "Deep, Big, Simple Neural Nets").

The published one has five hidden layers of 2,500, 2,000, 1,500, 1,000 and 500 neurons on images of 29x29. Here neurons
are ReLUs instead of scaled hyperbolic tangents. For its number of parameters a perceptron computes little, so the
network decides how long a step takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class MlpShape:
    """Widths of the hidden layers, size of the images, and classes."""

    hidden: tuple[int, ...] = (2500, 2000, 1500, 1000, 500)  # wider has more parameters, by the product of neighbours
    side: int = 29  # pixels
    channels: int = 1
    classes: int = 10


class Mlp(nn.Module):
    """Maps images to class scores."""

    def __init__(self, shape: MlpShape) -> None:
        super().__init__()
        widths = (shape.channels * shape.side**2, *shape.hidden)
        layers = [layer for inputs, outputs in pairwise(widths) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(widths[-1], shape.classes)

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores
