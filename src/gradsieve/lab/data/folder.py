"""Pictures as files, a folder a class: the layout in which ImageNet is unpacked.

`train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Training takes a random part of a picture, at least 8 % of its area,
and mirrors every other one; testing takes the middle (Szegedy et al., 2015; He et al., 2016).
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

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.data.images import ImageBatch

SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIN_AREA, MIN_ASPECT = 0.08, 3 / 4
MIDDLE_SHARE = 224 / 256  # of the shorter side, when testing
THREADS = 4  # decoding lets go of the interpreter's lock


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Files and the class of each."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> ImageBatch:
        """These pictures; with a generator, a random part of each."""
        chosen = indices.tolist()
        if generator is None:
            draws: list[list[float]] | list[None] = [None] * len(chosen)
        else:
            draws = torch.rand(len(chosen), 5, generator=generator).tolist()
        with ThreadPoolExecutor(THREADS) as pool:
            pictures = list(pool.map(lambda i, draw: _read(self.files[i], self.side, draw), chosen, draws))
        images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
        return ImageBatch(images, torch.tensor([self.labels[i] for i in chosen]))


class FolderPair(NamedTuple):
    """What is trained on, what is tested on, and how many channels and classes there are."""

    train: FolderSet
    test: FolderSet
    channels: int
    classes: int


def read_folder(root: Path | None, side: int) -> FolderPair:
    """The two parts; the names of the classes must be the same in both."""
    if root is None or not (root / "train").is_dir() or not (root / "val").is_dir():
        raise MissingDataError(
            f"ImageNet cannot be fetched: give the folder that has train/<class>/*.JPEG and val/<class>/*.JPEG, "
            f"got {root or 'none'}; or train the default preset, which needs no download"
        )
    classes, others = (sorted(entry.name for entry in (root / part).iterdir() if entry.is_dir()) for part in _PARTS)
    if classes != others or not classes:
        raise InputError(f"{root}: train has {len(classes)} classes, val {len(others)}; they must be the same")
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
        raise MissingDataError(f"{folder} has no pictures ({', '.join(sorted(SUFFIXES))}) in its folders of classes")
    files, labels = zip(*found, strict=True)
    return FolderSet(files, labels, side)


def _read(file: Path, side: int, draw: list[float] | None) -> NDArray[np.float32]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{file} cannot be read as a picture: {error}") from None
    box = _middle(*picture.size) if draw is None else _part(*picture.size, draw)
    picture = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(picture, dtype=np.float32)
    if draw is not None and draw[4] < 0.5:
        pixels = pixels[:, ::-1]
    mean, deviation = np.array(MEAN), np.array(DEVIATION)
    normed: NDArray[np.float32] = ((pixels / 255 - mean) / deviation).astype(np.float32)
    return normed


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    edge = min(width, height) * MIDDLE_SHARE
    return (width - edge) / 2, (height - edge) / 2, (width + edge) / 2, (height + edge) / 2


def _part(width: int, height: int, draw: list[float]) -> tuple[float, float, float, float]:
    """Area and shape by lot, cut to what the picture has, then a place by lot."""
    area = width * height * (MIN_AREA + (1 - MIN_AREA) * draw[0])
    aspect = MIN_ASPECT ** (1 - 2 * draw[1])  # from 3/4 to 4/3, even in logarithms
    wide, high = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
    left, top = (width - wide) * draw[2], (height - high) * draw[3]
    return left, top, left + wide, top + high
