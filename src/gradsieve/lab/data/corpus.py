"""Text corpora: the sources of Python's standard library, which every machine has, or the user's files.

Whole files are held out for tests, so that no test text was trained on.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import MissingDataError

TESTS = frozenset({"test", "tests", "idle_test"})  # folders; some systems install Python without them
SKIPPED = frozenset({"site-packages", "dist-packages", "lib2to3", "__pycache__"})
HELD_OUT_ONE_IN = 10
MIN_BYTES = 1_000_000  # of library sources; a stripped installation has fewer
TEXT_SUFFIXES = (".txt", ".md", ".rst")


class Corpus(NamedTuple):
    """Documents for training and for tests."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    def digest(self) -> str:
        """A hash of the whole text, the key for cached results computed from it."""
        state = hashlib.sha256()
        for part in self:
            state.update(str(len(part)).encode())
            for document in part:
                content = document.encode()
                state.update(len(content).to_bytes(8, "little") + content)
        return state.hexdigest()


class Parts(NamedTuple):
    """Documents for training, for tuning, and for final tests."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


def in_three(corpus: Corpus) -> Parts:
    """Move one training document in ten to a validation part. No document is in two parts.

    The documents' checksums decide, so that the same text is always split in the same way.
    """
    known = sorted(set(corpus.train) - set(corpus.test), key=lambda document: (zlib.crc32(document.encode()), document))
    if len(known) < 2:
        raise InputError(
            f"a validation part needs at least 2 different training files, got {len(known)}: "
            f"split the text into more files"
        )
    apart = set(known[: max(1, len(known) // HELD_OUT_ONE_IN)])
    held_out = apart.union(corpus.test)
    train = tuple(document for document in corpus.train if document not in held_out)
    return Parts(train, tuple(document for document in corpus.train if document in apart), corpus.test)


def read_library(root: Path | None = None, with_tests: bool = False) -> Corpus:
    """The sources of all modules, in a fixed order; with the library's tests if requested and installed."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    corpus = _split(folder, (".py",), SKIPPED if with_tests else SKIPPED | TESTS)
    num_bytes = sum(map(len, (*corpus.train, *corpus.test)))
    if num_bytes < MIN_BYTES or not corpus.test:
        raise MissingDataError(
            f"the text is the source of Python's standard library, but {folder} has only {num_bytes} bytes of it: "
            f"use a Python with its library as plain files, or give a folder of text"
        )
    return corpus


def read_text(path: Path | None) -> Corpus:
    """Penn Treebank if the folder has ptb.train.txt, else any text files, one in ten of them held out."""
    if path is None or not path.is_dir():
        raise MissingDataError(
            f"give a folder of text: ptb.train.txt and ptb.test.txt, or files ending in {', '.join(TEXT_SUFFIXES)}, "
            f"got {path or 'none'}"
        )
    if is_treebank(path):
        return read_treebank(path)
    corpus = _split(path, TEXT_SUFFIXES, SKIPPED | TESTS)
    if not corpus.train or not corpus.test:
        found = len(corpus.train) + len(corpus.test)
        raise MissingDataError(
            f"{path} has {found} text files, too few to hold some out: split the text into 20 files or more"
        )
    return corpus


def is_treebank(path: Path | None) -> bool:
    """Whether the folder contains Penn Treebank in Mikolov's form."""
    return path is not None and (path / "ptb.train.txt").is_file()


def read_treebank(folder: Path) -> Corpus:
    """One sentence per line, words separated by blanks, rare words as <unk>. The end of a line becomes <eos>."""
    parts = []
    for name in ("ptb.train.txt", "ptb.test.txt"):
        try:
            lines = (folder / name).read_text().splitlines()
        except FileNotFoundError:
            raise MissingDataError(f"{folder} has ptb.train.txt but no {name}") from None
        parts.append((" ".join(f"{line.strip()} <eos>" for line in lines if line.strip()),))
    return Corpus(*parts)


def _split(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Corpus:
    """Split files into training and test parts; the checksum of the name decides."""
    parts: tuple[list[str], list[str]] = ([], [])
    for path in _files(folder, suffixes, skipped):
        name = path.relative_to(folder).as_posix()
        try:
            document = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        if document:
            parts[zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0].append(document)
    return Corpus(*map(tuple, parts))


def _files(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - skipped)
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(suffixes))
