"""A space: where a process without root can build networks.

A space is a user namespace in which this user has all capabilities, with a mount namespace in which /run is its own, so
that `ip netns` can keep names there. It has no network of its own: outside the hosts, programs use the machine's. Files
are this user's as before. A guard keeps each space alive (`guard.py`).
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gradsieve.lab.network import guard
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.folder import ROOTS_FOLDER, users_folder
from gradsieve.lab.network.forbidden import no_space
from gradsieve.lab.network.privilege import RUN
from gradsieve.lab.network.syscalls import BIND, NEW_MOUNTS, NEW_USER, RECURSIVE, SLAVE, mount, setns, unshare

GUARD_FILE = RUN / "gradsieve-guard.json"
GUARD_START_SECONDS = 30.0
OWN_NAMES = ("netns", ROOTS_FOLDER.name, GUARD_FILE.name)  # in /run, of each space


@dataclass(frozen=True)
class Member:
    """A process in a space, such as its guard. The time it started at tells it from a later process of the same id."""

    process: int
    started: int  # in the kernel's clock ticks since it booted

    @classmethod
    def of(cls, process: int) -> Member:
        started = _start_time(process)
        if started is None:
            raise NetworkError(f"process {process} of the space has ended")
        return cls(process, started)

    def is_alive(self) -> bool:
        return _start_time(self.process) == self.started

    def join(self) -> None:
        """Move this process, which must have one thread only, into the same space."""
        here = os.getcwd()
        try:
            user, mounts = (os.open(f"/proc/{self.process}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt"))
            if not self.is_alive():  # checked on the open files, so it cannot change any more
                raise ProcessLookupError
            setns(user, NEW_USER)
            setns(mounts, NEW_MOUNTS)
            os.chdir(here)  # it is / after setns
        except OSError as error:
            raise NetworkError(f"cannot join the space of process {self.process}: {error}") from None


def enter_new_space() -> None:
    """Move this process, which must have one thread only, into a new space."""
    user, group = os.geteuid(), os.getegid()
    folder = users_folder()
    try:
        unshare(NEW_USER | NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny")  # otherwise the kernel refuses the next two
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _make_run_our_own()
    except OSError as error:
        raise no_space(error) from None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mount(str(folder), str(ROOTS_FOLDER), None, BIND)
    except OSError as error:
        raise NetworkError(f"the folder of state files cannot be used: {error}: set XDG_RUNTIME_DIR") from None
    _start_guard()


def own_guard() -> Member | None:
    """The guard of the space that this process is in, also if it has ended. None outside spaces."""
    try:
        return Member(**json.loads(GUARD_FILE.read_text()))
    except FileNotFoundError:
        return None


def living_guard() -> Member | None:
    """The same, but a new one if it has ended."""
    known = own_guard()
    return known if known is None or known.is_alive() else _start_guard()


def _make_run_our_own() -> None:
    """Mount an empty file system over /run, and show in it what was there before."""
    mount("none", "/", None, SLAVE | RECURSIVE)  # later mounts of the machine appear here, ours do not appear there
    before = os.open(RUN, os.O_RDONLY | os.O_DIRECTORY)
    names = [name for name in os.listdir(before) if name not in OWN_NAMES]
    mount("gradsieve", str(RUN), "tmpfs", 0, "mode=0755")
    for name in names:
        with suppress(OSError):  # what this user may not even look at stays away
            _show(before, name)
    (RUN / "netns").mkdir()
    ROOTS_FOLDER.mkdir()
    os.close(before)


def _show(before: int, name: str) -> None:
    """Show one entry of the former /run under the same name."""
    mode = os.stat(name, dir_fd=before, follow_symlinks=False).st_mode
    path = RUN / name
    if stat.S_ISLNK(mode):
        path.symlink_to(os.readlink(name, dir_fd=before))
        return
    if stat.S_ISDIR(mode):
        path.mkdir()
    else:
        path.touch()
    mount(f"/proc/self/fd/{before}/{name}", str(path), None, BIND | RECURSIVE)


def _start_guard() -> Member:
    """Start the guard of the space that this process is in, and is the owner of."""
    owner = os.pidfd_open(os.getpid())
    try:
        command = [sys.executable, "-I", "-S", str(guard.__file__), str(owner)]
        started = subprocess.run(
            command, capture_output=True, text=True, timeout=GUARD_START_SECONDS, check=True, pass_fds=[owner]
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NetworkError(f"the guard of the space cannot be started: {error}") from None
    finally:
        os.close(owner)
    known = Member.of(int(started.stdout))
    GUARD_FILE.write_text(json.dumps(asdict(known)))
    return known


def _start_time(process: int) -> int | None:
    """None if there is no such process, or it is dead and only waits for its parent."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
