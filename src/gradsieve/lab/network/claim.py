"""Which process owns which laboratory: a state file that lists what was created, and a lock.

The file is written before the first namespace is created and removed after the last one is gone. So everything that a
killed process leaves behind is known, and nothing else is ever touched. The kernel frees the lock of a dead process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gradsieve.errors import InputError
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.folder import existing_state_folder, state_folder
from gradsieve.lab.network.privilege import can_build
from gradsieve.lab.network.space import Member, living_guard, own_guard
from gradsieve.lab.network.switch import Site
from gradsieve.lab.network.topology import Topology

ORPHAN_SECONDS = 2.0  # a child that a killed owner was just starting keeps the lock for a moment
NAME_FORM = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")


@dataclass(frozen=True)
class Claim:
    """The content of a state file."""

    name: str
    site: Site
    process: int  # id of the process that built it
    stays: bool  # until `lab down`, not only for the lifetime of that process
    guard: Member | None  # of the space it is in; None if root built it
    complete: bool = False

    @classmethod
    def fresh(cls, name: str, topology: Topology, *, stays: bool) -> Claim:
        """A claim with a new random identity, so that its names are unused."""
        return cls(name, Site(secrets.token_hex(4), topology), os.getpid(), stays, living_guard())

    @property
    def is_up(self) -> bool:
        """Whether it is built and stays without the process that built it."""
        return self.complete and self.stays and self.is_reachable

    @property
    def is_reachable(self) -> bool:
        """Whether its namespaces can be used: a space ends with its guard."""
        return self.guard is None or self.guard.is_alive()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is in another space, from where there is no way to its namespaces."""
        return can_build() and self.guard != own_guard()

    def completed(self) -> Claim:
        return replace(self, complete=True)

    def write(self) -> None:
        """Write the state file atomically."""
        content = {
            "name": self.name,
            "identity": self.site.identity,
            "topology": self.site.topology.to_json(),
            "process": self.process,
            "stays": self.stays,
            "guard": None if self.guard is None else asdict(self.guard),
            "complete": self.complete,
        }
        draft = _path(self.name).with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(_path(self.name))

    def forget(self) -> None:
        """Remove the state file, after everything it lists was removed."""
        _path(self.name).unlink(missing_ok=True)


def read_claim(name: str) -> Claim | None:
    """The claim of this name, or None if there is no state file."""
    try:
        known = json.loads(_path(name).read_text())
        topology = Topology(tuple(known["topology"]["rates"]), known["topology"]["latency_seconds"])
        site = Site(known["identity"], topology)
        guard = None if known.get("guard") is None else Member(**known["guard"])
        return Claim(name, site, known["process"], known["stays"], guard, known["complete"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NetworkError(f"the state file {_path(name)} cannot be read ({error}): see docs/network-lab.md") from None


def known_names() -> list[str]:
    """Names of all laboratories that are up or were left behind."""
    return sorted(path.stem for path in state_folder().glob("*.json"))


def check_name(name: str) -> str:
    """Return the name if it can be a file name, raise otherwise."""
    if not NAME_FORM.fullmatch(name):
        raise InputError(
            f"a laboratory's name must start with a-z or 0-9 and have at most 32 characters of a-z, 0-9, '-', '_' "
            f"and '.', got {name!r}"
        )
    return name


@contextmanager
def held(name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a laboratory's lock; raise if another process holds it."""
    path = existing_state_folder() / f"{check_name(name)}.lock"
    descriptor = _locked(path, shared)
    try:
        yield
    finally:
        if not shared and not _path(name).exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, shared: bool) -> int:
    """Open and lock the file and write our process id to it. Returns its descriptor.

    Repeats if the file was removed between opening and locking.
    """
    import fcntl  # not on Windows, where this module is imported, too

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
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
                    "wait for it, end it, or use another --name"
                ) from None
            time.sleep(0.02)
        os.close(descriptor)


def is_held(name: str) -> bool:
    """Whether any process holds the lock."""
    try:
        with held(name, shared=False):
            return False
    except NetworkError:
        return True


def _path(name: str) -> Path:
    return state_folder() / f"{name}.json"
