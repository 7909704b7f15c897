"""Speech to characters after Deep Speech 2 (Amodei et al., 2015), in the unidirectional form that the papers count.

1. Two convolutions over (frequency, time) with batch norm; the first halves time, both halve frequency.
2. Five unidirectional LSTM layers of 800, with batch norm before each except the first.
3. A look-ahead convolution: each feature sees itself and 20 frames ahead (Wang et al., 2016).
4. Batch norm and a linear layer without bias to 29 labels: blank, apostrophe, A to Z, space.

With 161 frequencies (20 ms at 16 kHz) it has 27,569,568 parameters: 251,168 in 1, 27,276,800 in 2, 16,800 in 3, 24,800
in 4. Another number of features changes only the input width of the first LSTM layer. Padding is masked after every
convolution and excluded from the norms from 2 on, so the output for a recording does not depend on the rest of its
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

KERNELS = ((41, 11), (21, 11))  # (frequency, time) of the two convolutions
STRIDES = ((2, 2), (2, 1))
CEILING = 20.0  # upper limit of the clipped ReLU


@dataclass(frozen=True)
class DeepSpeechShape:
    """Layers, widths, input features and labels."""

    features: int = 161  # values per frame
    labels: int = 29  # characters, including the blank
    channels: int = 32  # of the convolutions
    hidden: int = 800  # wider learns more; time grows with its square
    layers: int = 5
    lookahead: int = 20  # future frames that an output may see; more is more accurate, with more delay


class DeepSpeech(nn.Module):
    """Maps frames of features to log-probabilities of labels, for CTC."""

    def __init__(self, shape: DeepSpeechShape) -> None:
        super().__init__()
        planes = (1, shape.channels, shape.channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(planes[i], planes[i + 1], KERNELS[i], STRIDES[i], (KERNELS[i][0] // 2, KERNELS[i][1] // 2))
            for i in range(2)
        )
        self.plane_norms = nn.ModuleList(nn.BatchNorm2d(shape.channels) for _ in range(2))
        width = shape.channels * ((shape.features + 3) // 4)
        widths = [width] + [shape.hidden] * (shape.layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(inputs, shape.hidden, batch_first=True) for inputs in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(shape.hidden) for _ in widths)
        taps = shape.lookahead + 1
        self.ahead = nn.Conv1d(shape.hidden, shape.hidden, taps, groups=shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, shape.labels, bias=False)

    @override
    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Maps (batch, time, features) and the lengths in frames to (batch, time/2, labels) and its lengths."""
        planes = frames.transpose(1, 2).unsqueeze(1)
        inside = _inside(lengths, frames.shape[1])
        for convolution, norm, stride in zip(self.convolutions, self.plane_norms, STRIDES, strict=True):
            planes = convolution(planes)
            lengths = (lengths + stride[1] - 1) // stride[1]
            inside = _inside(lengths, planes.shape[3])
            planes = functional.hardtanh(norm(planes), 0.0, CEILING) * inside[:, None, None, :]
        features = planes.flatten(1, 2).transpose(1, 2)
        for index, layer in enumerate(self.layers):
            if index > 0:
                features = _normed(self.norms[index - 1], features, inside)
            features, _ = layer(features)
        features = features * inside[:, :, None]
        padded = functional.pad(features.transpose(1, 2), (0, self.ahead.kernel_size[0] - 1))
        features = functional.hardtanh(self.ahead(padded), 0.0, CEILING).transpose(1, 2)
        scores = self.head(_normed(self.norms[-1], features, inside))
        return scores.log_softmax(2), lengths


def _inside(lengths: Tensor, time: int) -> Tensor:
    """True where a frame belongs to the recording."""
    return torch.arange(time, device=lengths.device) < lengths[:, None]


def _normed(norm: nn.Module, features: Tensor, inside: Tensor) -> Tensor:
    """Batch norm over the frames inside the recordings; zeros elsewhere."""
    normed = torch.zeros_like(features)
    normed[inside] = norm(features[inside])
    return normed
