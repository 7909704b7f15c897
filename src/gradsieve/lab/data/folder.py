"""Images as files, one folder per class: the layout of ImageNet.

`train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Training crops a random part of an image, at least 8 % of its area, and
mirrors half of the images. Tests crop the centre (Szegedy et al., 2015; He et al., 2016).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.data.dataset import Dataset
from gradsieve.lab.data.images import ImageBatch

SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIN_AREA, MIN_ASPECT = 0.08, 3 / 4
CENTRE_SHARE = 224 / 256  # of the shorter side, in tests
THREADS = 4  # decoding releases the interpreter's lock


@dataclass(frozen=True, eq=False)
class FolderSet(Dataset[ImageBatch]):
    """Image files and their classes."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    @override
    def __len__(self) -> int:
        return len(self.files)

    @override
    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> ImageBatch:
        """With a generator, a random crop of each image; without, the centre."""
        chosen = indices.tolist()
        if generator is None:
            draws: list[list[float]] | list[None] = [None] * len(chosen)
        else:
            draws = torch.rand(len(chosen), 5, generator=generator).tolist()
        with ThreadPoolExecutor(THREADS) as pool:
            images = list(pool.map(lambda i, draw: _read(self.files[i], self.side, draw), chosen, draws))
        stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        return ImageBatch(stacked, torch.tensor([self.labels[i] for i in chosen]))


class FolderPair(NamedTuple):
    """Training and test part, and their numbers of channels and classes."""

    train: FolderSet
    test: FolderSet
    channels: int
    classes: int


def read_folder(root: Path | None, side: int) -> FolderPair:
    """Both parts. They must have the same classes."""
    if root is None or not (root / "train").is_dir() or not (root / "val").is_dir():
        raise MissingDataError(
            f"ImageNet cannot be fetched: give a folder with train/<class>/*.JPEG and val/<class>/*.JPEG, "
            f"got {root or 'none'}; or train the default preset, which needs no download"
        )
    classes, others = (sorted(entry.name for entry in (root / part).iterdir() if entry.is_dir()) for part in _PARTS)
    if classes != others or not classes:
        raise InputError(f"{root}: train has {len(classes)} classes, val {len(others)}; they must be equal")
    train, test = (_listed(root / part, classes, side) for part in _PARTS)
    return FolderPair(train, test, channels=3, classes=len(classes))


_PARTS = ("train", "val")


def _listed(folder: Path, classes: list[str], side: int) -> FolderSet:
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise MissingDataError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))}) in its class folders")
    files, labels = zip(*found, strict=True)
    return FolderSet(files, labels, side)


def _read(file: Path, side: int, draw: list[float] | None) -> NDArray[np.float32]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{file} cannot be read as an image: {error}") from None
    box = _centre(*image.size) if draw is None else _random_crop(*image.size, draw)
    image = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image, dtype=np.float32)
    if draw is not None and draw[4] < 0.5:
        pixels = pixels[:, ::-1]
    mean, deviation = np.array(MEAN), np.array(DEVIATION)
    normed: NDArray[np.float32] = ((pixels / 255 - mean) / deviation).astype(np.float32)
    return normed


def _centre(width: int, height: int) -> tuple[float, float, float, float]:
    edge = min(width, height) * CENTRE_SHARE
    return (width - edge) / 2, (height - edge) / 2, (width + edge) / 2, (height + edge) / 2


def _random_crop(width: int, height: int, draw: list[float]) -> tuple[float, float, float, float]:
    """A box of random area and aspect, limited to the image, at a random position. `draw` is uniform in [0, 1)."""
    area = width * height * (MIN_AREA + (1 - MIN_AREA) * draw[0])
    aspect = MIN_ASPECT ** (1 - 2 * draw[1])  # from 3/4 to 4/3, uniform in the logarithm
    wide, high = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
    left, top = (width - wide) * draw[2], (height - high) * draw[3]
    return left, top, left + wide, top + high
