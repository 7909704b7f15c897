"""Users without any rights of root, for tests that themselves may run as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gradsieve
from gradsieve.lab.network.privilege import in_user_namespace

SECONDS = 120.0
INTERPRETERS = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}", "/usr/bin/python3")
PROBE = "import sys, click; assert sys.version_info[:2] == {}"


@dataclass(frozen=True)
class PlainUser:
    """A user with a home of its own, and an interpreter that it may run."""

    id: int
    home: Path
    python: str = sys.executable
    before: tuple[str, ...] = ()  # a command line that runs each command
    switches: Mapping[str, Any] = field(default_factory=dict)  # arguments for Popen

    @property
    def gradsieve(self) -> list[str]:
        return [self.python, "-m", "gradsieve.cli"]

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*self.before, *command],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            **self.switches,
        )

    def run(self, *command: str, seconds: float = SECONDS) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*command)
        try:
            out, said = process.communicate(timeout=seconds)
        finally:
            process.kill()
        return process.returncode, out, said

    def lab(self, *arguments: str) -> tuple[int, str, str]:
        return self.run(*self.gradsieve, "lab", *arguments)

    @property
    def environment(self) -> dict[str, str]:
        """That of a login: nothing of root's, but the same packages."""
        packages = [path for path in sys.path if path.endswith("site-packages")]
        return {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "NUMBA_CACHE_DIR": str(self.home / "numba"),
            "PYTHONPATH": os.pathsep.join([str(Path(gradsieve.__file__).parents[1]), *packages]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def states(self) -> set[str]:
        """Names of the user's state files and locks."""
        return {path.name for path in (self.home / f"gradsieve-{self.id}").glob("*")}

    def processes(self) -> dict[int, str]:
        """Command lines of the processes with this user's home."""
        mark = f"HOME={self.home}".encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def remaining(self) -> dict[int, str]:
        """The processes, once all have had time to end."""
        eventually(lambda: not self.processes())
        return self.processes()


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


@contextmanager
def plain_user() -> Iterator[PlainUser]:
    """A user that may make user namespaces; the test is skipped if none can."""
    _require_machine()
    own = os.geteuid()
    number = own or 61_000 + os.getpid() % 4_000  # above what distributions give to users
    with _home(number) as home:
        switches = {} if own else {"user": number, "group": number, "extra_groups": []}
        user = PlainUser(number, home, _interpreter(PlainUser(number, home, switches=switches)), (), switches)
        _require_user_namespaces(user)
        yield user


@contextmanager
def container_root(without: Sequence[str] = ("sys_admin", "net_admin")) -> Iterator[PlainUser]:
    """The root of a container, which lacks these capabilities."""
    _require_machine()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("dropping capabilities needs root and setpriv")
    with _home(0) as home:
        drop = ("setpriv", "--bounding-set", ",".join(f"-{name}" for name in without))
        if "setfcap" not in without:  # without it no namespace can be made
            _require_user_namespaces(PlainUser(0, home, before=drop))
        yield PlainUser(0, home, before=drop)


@contextmanager
def _home(owner: int) -> Iterator[Path]:
    """A home in /tmp: pytest's folders are closed to other users. No process of the user outlives it."""
    home = Path(tempfile.mkdtemp(prefix="gradsieve-home-", dir="/tmp"))
    os.chown(home, owner, owner if os.geteuid() == 0 else -1)
    try:
        yield home
    finally:
        for process in PlainUser(owner, home).processes():
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def _interpreter(user: PlainUser) -> str:
    """The first interpreter that the user may run: that of root may be in root's home."""
    for python in INTERPRETERS:
        try:
            if user.run(python, "-c", PROBE.format(tuple(sys.version_info[:2])))[0] == 0:
                return python
        except OSError:
            continue
    pytest.skip(f"a plain user can run none of {', '.join(INTERPRETERS)} with the packages of this environment")


def _require_machine() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("user namespaces need Linux")
    if in_user_namespace():
        pytest.skip("there are no other users in a user namespace: run these tests outside")


def _require_user_namespaces(user: PlainUser) -> None:
    try:
        code, _, said = user.run("unshare", "--user", "--map-root-user", "--mount", "true")
    except OSError as error:
        code, said = 1, str(error)
    if code:
        pytest.skip(f"user namespaces are forbidden here: {said.strip()}")
