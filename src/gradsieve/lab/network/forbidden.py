"""Why this machine lets no ordinary user build networks."""

from __future__ import annotations

import errno
from pathlib import Path

from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.privilege import status_field

SYSTEM = Path("/proc/sys")
FULL = (errno.ENOSPC, errno.EUSERS)  # how the kernel says that a limit is reached
SECCOMP_FILTER = "2"


def no_space(error: OSError) -> NetworkError:
    """The error for the user, after the kernel refused a step."""
    return NetworkError(
        f"no network can be built here without root, because {_reason(error)}: change that, run as root, or leave "
        "--network out (benchmarks then run over loopback)"
    )


def _reason(error: OSError) -> str:
    """The setting that forbids it, as far as it can be read."""
    for name in ("user", "mnt"):
        limit = _setting(f"user/max_{name}_namespaces")
        if limit == "0" or (limit and name == "user" and error.errno in FULL):
            return f"user.max_{name}_namespaces is {limit}"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "kernel.unprivileged_userns_clone is 0"
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "kernel.apparmor_restrict_unprivileged_userns is 1"
    if not Path("/proc/self/ns/user").exists():
        return "the kernel was built without user namespaces (CONFIG_USER_NS)"
    said = f"{error.filename or ''} {error.strerror}".strip()
    if status_field("Seccomp") == SECCOMP_FILTER:
        return f"user namespaces are refused ({said}), probably by the seccomp profile of this container"
    return f"user namespaces are refused ({said})"


def _setting(path: str) -> str | None:
    try:
        return (SYSTEM / path).read_text().strip()
    except OSError:
        return None
