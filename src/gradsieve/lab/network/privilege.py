"""What this process may do: Linux grants the parts of root's power one by one, as capabilities."""

from __future__ import annotations

import os
from pathlib import Path

SYS_ADMIN, NET_ADMIN = 21, 12  # numbers of the capabilities that namespaces and interfaces need
EVERY_USER = ["0", "0", "4294967295"]  # the user map of a machine's own user namespace
RUN = Path("/run")  # `ip netns` keeps its names there


def can_build() -> bool:
    """Whether this process may build networks: as root of the machine, or inside a space.

    Root in a container often may not. Root in a user namespace of its own may, if its /run is its own as well.
    """
    needed = 1 << SYS_ADMIN | 1 << NET_ADMIN
    return _effective_capabilities() & needed == needed and os.access(RUN, os.W_OK)


def in_user_namespace() -> bool:
    """Whether this process is inside a user namespace other than the machine's own."""
    try:
        return Path("/proc/self/uid_map").read_text().split() != EVERY_USER
    except OSError:
        return False  # a kernel without user namespaces


def status_field(name: str) -> str:
    """One line of the kernel's description of this process. Empty if there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _effective_capabilities() -> int:
    return int(status_field("CapEff") or "0", 16)
