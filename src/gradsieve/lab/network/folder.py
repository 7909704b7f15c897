"""The folder of state files and locks: root's, or this user's."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.privilege import RUN, can_build

ROOTS_FOLDER = RUN / "gradsieve"  # inside a space, the user's folder is mounted there


def state_folder() -> Path:
    """The folder for networks that this process can build, or can enter a space for. It may not exist yet."""
    return ROOTS_FOLDER if can_build() else users_folder()


def existing_state_folder() -> Path:
    """The same, created if it does not exist."""
    folder = state_folder()
    if folder == ROOTS_FOLDER:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder.mkdir(mode=0o700, exist_ok=True)
    return users_folder()


def users_folder() -> Path:
    """A folder that all processes of this user find and that no other user can write to."""
    runtime = _runtime_folder()
    folder = runtime / "gradsieve" if runtime else Path(tempfile.gettempdir()) / f"gradsieve-{os.geteuid()}"
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return folder
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NetworkError(
            f"{folder} must be a folder that only this user (id {os.geteuid()}) can write to, for state files: "
            "remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def _runtime_folder() -> Path | None:
    """The login session's. A cron job lacks the variable, and after `su` it is another user's."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(named)] if named else []
    candidates.append(RUN / "user" / str(os.geteuid()))
    return next((path for path in candidates if path.is_absolute() and _is_ours(path)), None)


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid() and os.access(path, os.W_OK)
    except OSError:
        return False
