"""The cache: a folder for data that was downloaded or computed once. Its entries are always complete.

It is `GRADSIEVE_CACHE`, else `$XDG_CACHE_HOME/gradsieve`, else `~/.cache/gradsieve`. An entry is a folder that appears
by one rename when it is complete. If several processes need the same entry, one creates it and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gradsieve.errors import InputError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the amount done, and the total amount."""

CHUNK_BYTES = 1 << 20


class MissingDataError(InputError):
    """Data was not found; the message says how to get it."""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that ignores every call."""


def cache_folder() -> Path:
    """The path of the cache. It need not exist yet."""
    own = os.environ.get("GRADSIEVE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "gradsieve"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The entry of this name. If it does not exist, `make` fills it, in one process only."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not target.is_dir():
                _fill(target, make)
    except OSError as error:
        path = error.filename or target
        raise InputError(
            f"cannot write to the cache, {path}: {error.strerror or error}; "
            f"set GRADSIEVE_CACHE to a writable folder with free space"
        ) from None
    return target


def _fill(target: Path, make: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of this entry. The system frees it however the process ends."""
    try:
        import fcntl
    except (
        ImportError
    ):  # no locks on this system: the work may be done twice, and the second rename fails or is harmless
        yield
        return
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def require_sha256(path: Path, expected: str, progress: Progress = silent) -> None:
    """Raise an error if the file is not the expected version."""
    found = sha256_of(path, progress)
    if found != expected:
        raise InputError(f"{path.name} is damaged or another version: its sha256 is {found}, expected {expected}")
