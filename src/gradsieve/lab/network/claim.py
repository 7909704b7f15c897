"""Who has which laboratory: a file with exactly what was created, and a lock that ends with its holder.

The file is written before the first namespace is created and removed after the last is gone. So whatever a killed
process leaves behind is known, and nothing else is ever touched. The kernel frees the lock of a process that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gradsieve.errors import InputError
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.switch import Site
from gradsieve.lab.network.topology import Topology

FOLDER = Path("/run/gradsieve")
ORPHAN_SECONDS = 2.0  # a child that a killed holder was just starting keeps the lock for a moment
NAME_FORM = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")


@dataclass(frozen=True)
class Claim:
    """What a state file says."""

    name: str
    site: Site
    process: int  # that built it
    stays: bool  # up until `down`, and not only as long as that process
    complete: bool = False

    @classmethod
    def fresh(cls, name: str, topology: Topology, *, stays: bool) -> Claim:
        """A claim on names that nobody else has."""
        return cls(name, Site(secrets.token_hex(4), topology), os.getpid(), stays)

    @property
    def is_up(self) -> bool:
        """Built, and meant to be there without its builder."""
        return self.complete and self.stays

    def completed(self) -> Claim:
        """After building."""
        return replace(self, complete=True)

    def write(self) -> None:
        """To disk, whole or not at all."""
        content = {
            "name": self.name,
            "identity": self.site.identity,
            "topology": self.site.topology.to_json(),
            "process": self.process,
            "stays": self.stays,
            "complete": self.complete,
        }
        draft = _path(self.name).with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(_path(self.name))

    def forget(self) -> None:
        """After everything is removed."""
        _path(self.name).unlink(missing_ok=True)


def read_claim(name: str) -> Claim | None:
    """What is there under this name, if anything."""
    try:
        known = json.loads(_path(name).read_text())
        topology = Topology(tuple(known["topology"]["rates"]), known["topology"]["latency_seconds"])
        site = Site(known["identity"], topology)
        return Claim(name, site, known["process"], known["stays"], known["complete"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NetworkError(f"the state file {_path(name)} cannot be read ({error}): see docs/network-lab.md") from None


def known_names() -> list[str]:
    """All laboratories that are there or were left behind."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def check_name(name: str) -> str:
    """Names become file names."""
    if not NAME_FORM.fullmatch(name):
        raise InputError(f"a laboratory's name is made of a-z, 0-9, '-', '_' and '.', at most 32, got {name!r}")
    return name


@contextmanager
def held(name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a laboratory's lock; refuse if somebody else does."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{check_name(name)}.lock"
    descriptor = _locked(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        if not shared and not _path(name).exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, kind: int) -> int:
    """The locked file, with our number in it; the one that is there now, not one that was just removed."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode() or "another"
            if Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                os.close(descriptor)
                raise NetworkError(
                    f"the laboratory {path.stem!r} is in use by process {holder}: "
                    "wait for it or end it, or take another --name"
                ) from None
            time.sleep(0.02)
        os.close(descriptor)


def is_held(name: str) -> bool:
    """Whether somebody holds the lock."""
    try:
        with held(name, shared=False):
            return False
    except NetworkError:
        return True


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json"
