"""Pictures held in memory: batches of normed floats, moved and mirrored at random while training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gradsieve.lab.data.cifar import CLASSES, read_cifar10

CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DIGITS_MEAN, DIGITS_DEVIATION = (0.3053,), (0.3762,)
DIGITS_LEVELS = 16  # brightness in that data goes from 0 to this
HELD_OUT_ONE_IN = 5


class ImageBatch(NamedTuple):
    """(number, channel, height, width) floats, and the class of each."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Jitter:
    """How a picture may differ each time it is seen."""

    shift: int = 0  # pixels it may move each way: more is harder to learn by heart
    mirror: bool = False  # whether left and right may be swapped; wrong for digits


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Pictures as bytes, (number, height, width, channel)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    side: int  # pictures are enlarged to this
    jitter: Jitter = Jitter()

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> ImageBatch:
        """These pictures; with a generator, each jittered."""
        chosen = indices.numpy()
        pictures = torch.from_numpy(np.ascontiguousarray(self.images[chosen]))
        if generator is not None:
            pictures = _jittered(pictures, self.jitter, generator)
        floats = pictures.permute(0, 3, 1, 2).float().div_(255)
        mean, deviation = (torch.tensor(numbers)[:, None, None] for numbers in (self.mean, self.deviation))
        floats = floats.sub_(mean).div_(deviation)
        if floats.shape[2] != self.side:
            floats = functional.interpolate(floats, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return ImageBatch(floats.contiguous(), torch.from_numpy(self.labels[chosen].astype(np.int64)))


class ImagePair(NamedTuple):
    """What is trained on, what is tested on, and how many channels and classes there are."""

    train: ImageSet
    test: ImageSet
    channels: int
    classes: int


def read_digits(side: int) -> ImagePair:
    """1,797 handwritten digits of 8x8 (Alpaydin and Kaynak, 1998), inside scikit-learn; one in five is held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images[..., None] * (255 / DIGITS_LEVELS)).astype(np.uint8)
    labels = bunch.target.astype(np.uint8)
    is_test = np.arange(len(labels)) % HELD_OUT_ONE_IN == 0
    parts = [
        ImageSet(images[chosen], labels[chosen], DIGITS_MEAN, DIGITS_DEVIATION, side, Jitter(shift=1))
        for chosen in (~is_test, is_test)
    ]
    return ImagePair(parts[0], parts[1], channels=1, classes=10)


def read_cifar(side: int, path: Path | None) -> ImagePair:
    """CIFAR-10 with the usual augmentation: moved by up to four pixels, mirrored every other time."""
    data = read_cifar10(path)
    train, test = (
        ImageSet(part.images, part.labels, CIFAR_MEAN, CIFAR_DEVIATION, side, Jitter(shift=4, mirror=True))
        for part in data
    )
    return ImagePair(train, test, channels=3, classes=len(CLASSES))


def _jittered(pictures: Tensor, jitter: Jitter, generator: torch.Generator) -> Tensor:
    count, height, width, _ = pictures.shape
    rows, columns = torch.arange(height).expand(count, -1), torch.arange(width).expand(count, -1)
    if jitter.mirror:
        is_mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(is_mirrored, columns.flip(1), columns)
    if jitter.shift:
        reach = jitter.shift
        pictures = functional.pad(pictures, (0, 0, reach, reach, reach, reach))
        moves = torch.randint(2 * reach + 1, (2, count, 1), generator=generator)
        rows, columns = rows + moves[0], columns + moves[1]
    return pictures[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
