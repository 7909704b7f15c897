"""The folder where what was fetched or computed once is kept, so that it never has to be made twice or found half made.

`GRADSIEVE_CACHE` names it, else `$XDG_CACHE_HOME/gradsieve`, else `~/.cache/gradsieve`. A folder in it appears by one
rename when it is complete; of several processes that want the same thing, one makes it and the others wait.
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
"""Told what is being done, how much is done, and of how much."""

CHUNK_BYTES = 1 << 20


class MissingDataError(InputError):
    """Data is not where it was looked for; the sentence says how to get it."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def cache_folder() -> Path:
    """Where everything is kept; made by whoever writes first."""
    own = os.environ.get("GRADSIEVE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "gradsieve"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name; if there is none, `make` fills it, in one process only."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if not target.is_dir():
                _fill(target, make)
    except OSError as error:
        place = error.filename or target
        raise InputError(
            f"cannot write to the cache, {place}: {error.strerror or error}; set GRADSIEVE_CACHE to a folder with room"
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
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of this name; the system lets go of it however the process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks: the work may be done twice, and the second rename is refused or harmless
        yield
        return
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """The file's checksum, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def require_sha256(path: Path, expected: str, progress: Progress = silent) -> None:
    """Refuse a file that is not the one this code was written for."""
    found = sha256_of(path, progress)
    if found != expected:
        raise InputError(f"{path.name} is damaged or another version: its sha256 is {found}, expected {expected}")
