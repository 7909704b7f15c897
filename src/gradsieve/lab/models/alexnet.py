"""AlexNet in one tower (Krizhevsky, 2014, "One weird trick"): five convolutions, three fully connected layers.

This is torchvision's form: 64, 192, 384, 256, 256 channels, no local response norm, and 61,100,840 parameters with
1,000 classes. The two-tower original of 2012 differs. Images must have at least 63x63 pixels. At 224x224 the classifier
sees 6x6 features; maps of other sizes are pooled or repeated to that size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from gradsieve.lab.models.shape import init_convolutions


@dataclass(frozen=True)
class AlexNetShape:
    """Widths, input channels and classes."""

    width: int = 64  # channels of the first convolution; the others scale with it
    hidden: int = 4096  # width of the two large linear layers, which hold most parameters
    pooled: int = 6  # side of the feature map that the classifier sees; parameters grow with its square
    dropout: float = 0.5  # higher regularizes more and slows the start
    channels: int = 3
    classes: int = 1000


class AlexNet(nn.Module):
    """Maps images of at least 63x63 pixels to class scores."""

    def __init__(self, shape: AlexNetShape) -> None:
        super().__init__()
        width = shape.width
        self.features = nn.Sequential(
            nn.Conv2d(shape.channels, width, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(width, 3 * width, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(shape.pooled)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(shape.dropout), nn.Linear(4 * width * shape.pooled**2, shape.hidden), nn.ReLU(inplace=True),
            nn.Dropout(shape.dropout), nn.Linear(shape.hidden, shape.hidden), nn.ReLU(inplace=True),
            nn.Linear(shape.hidden, shape.classes),
        )  # fmt: skip
        init_convolutions(self)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear) and layer.out_features == shape.hidden:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.pool(self.features(images)))
        return scores
