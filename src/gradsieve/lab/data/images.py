"""Images in memory: normalized batches, randomly shifted and mirrored in training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from gradsieve.lab.data.cifar import CLASSES, read_cifar10
from gradsieve.lab.data.dataset import Dataset

CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DIGITS_MEAN, DIGITS_DEVIATION = (0.3053,), (0.3762,)
DIGITS_LEVELS = 16  # largest brightness in scikit-learn's digits
HELD_OUT_ONE_IN = 5


class ImageBatch(NamedTuple):
    """Images as (number, channel, height, width) floats, and their classes."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Jitter:
    """Random augmentation of an image."""

    shift: int = 0  # largest shift in pixels in each direction; larger makes memorizing harder
    mirror: bool = False  # whether half of the images are mirrored; wrong for digits


@dataclass(frozen=True, eq=False)
class ImageSet(Dataset[ImageBatch]):
    """Images as bytes, (number, height, width, channel)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    side: int  # images are resized to this
    jitter: Jitter = Jitter()

    @override
    def __len__(self) -> int:
        return len(self.labels)

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> ImageBatch:
        """With a generator, each image is jittered."""
        chosen = indices.numpy()
        images = torch.from_numpy(np.ascontiguousarray(self.images[chosen]))
        if generator is not None:
            images = _jittered(images, self.jitter, generator)
        floats = images.permute(0, 3, 1, 2).float().div_(255)
        mean, deviation = (torch.tensor(numbers)[:, None, None] for numbers in (self.mean, self.deviation))
        floats = floats.sub_(mean).div_(deviation)
        if floats.shape[2] != self.side:
            floats = functional.interpolate(floats, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return ImageBatch(floats.contiguous(), torch.from_numpy(self.labels[chosen].astype(np.int64)))


class ImagePair(NamedTuple):
    """Training and test part, and their numbers of channels and classes."""

    train: ImageSet
    test: ImageSet
    channels: int
    classes: int


def read_digits(side: int) -> ImagePair:
    """1,797 handwritten digits of 8x8 (Alpaydin and Kaynak, 1998) from scikit-learn. One in five is held out."""
    digits, turn = _digits(side)
    train = replace(_part(digits, turn != 0), jitter=Jitter(shift=1))
    return ImagePair(train, _part(digits, turn == 0), channels=1, classes=10)


def read_plain_digits(side: int, evaluate: str) -> ImagePair:
    """The same digits in three parts, not shifted. The training part does not depend on which other part is scored."""
    digits, turn = _digits(side)
    scored = _part(digits, turn == (1 if evaluate == "validation" else 0))
    return ImagePair(_part(digits, turn > 1), scored, channels=1, classes=10)


def _digits(side: int) -> tuple[ImageSet, NDArray[np.int64]]:
    """All digits, and which fifth of them each is in."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images[..., None] * (255 / DIGITS_LEVELS)).astype(np.uint8)
    digits = ImageSet(images, bunch.target.astype(np.uint8), DIGITS_MEAN, DIGITS_DEVIATION, side)
    return digits, np.arange(len(digits)) % HELD_OUT_ONE_IN


def _part(images: ImageSet, chosen: NDArray[np.bool_]) -> ImageSet:
    return replace(images, images=images.images[chosen], labels=images.labels[chosen])


def read_cifar(side: int, path: Path | None) -> ImagePair:
    """CIFAR-10 with the usual augmentation: shifts of up to four pixels, half of the images mirrored."""
    data = read_cifar10(path)
    train, test = (
        ImageSet(part.images, part.labels, CIFAR_MEAN, CIFAR_DEVIATION, side, Jitter(shift=4, mirror=True))
        for part in data
    )
    return ImagePair(train, test, channels=3, classes=len(CLASSES))


def _jittered(images: Tensor, jitter: Jitter, generator: torch.Generator) -> Tensor:
    count, height, width, _ = images.shape
    rows, columns = torch.arange(height).expand(count, -1), torch.arange(width).expand(count, -1)
    if jitter.mirror:
        is_mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(is_mirrored, columns.flip(1), columns)
    if jitter.shift:
        reach = jitter.shift
        images = functional.pad(images, (0, 0, reach, reach, reach, reach))
        moves = torch.randint(2 * reach + 1, (2, count, 1), generator=generator)
        rows, columns = rows + moves[0], columns + moves[1]
    return images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
