"""The tools of iproute2: `ip` and `tc`.

`ip -n` mounts a new /sys, which containers forbid, and `ip netns add` returns to the namespace it came from, which only
root of the machine may do. So in a user namespace the tools of util-linux do these two steps.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.privilege import can_build, in_user_namespace

NAMESPACES = Path("/run/netns")
TIMEOUT_SECONDS = 30.0
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


def require_tools() -> None:
    """Raise an error that names what is missing: Linux, or a tool."""
    if not sys.platform.startswith("linux"):
        raise NetworkError(
            f"networks need Linux, this is {sys.platform}: without --network, benchmarks run over loopback"
        )
    for tool, package in PACKAGES.items():
        # Root of the machine does without util-linux.
        if _path(tool) is None and (package == "iproute2" or in_user_namespace() or not can_build()):
            raise NetworkError(f"the network laboratory needs the command {tool!r}: install {package}")


def require_networks() -> None:
    """Raise an error if this process cannot build networks."""
    require_tools()
    if not can_build():
        raise NetworkError(
            "this process may not build networks: start it with `gradsieve lab enter -- COMMAND`, or as root, "
            "or use loopback"
        )


def ip(*arguments: str, namespace: str | None = None) -> str:
    """Run `ip` and return its output."""
    return _run("ip", arguments, namespace)


def tc(*arguments: str, namespace: str | None = None) -> str:
    """Run `tc` and return its output."""
    return _run("tc", arguments, namespace)


def ip_json(*arguments: str, namespace: str | None = None) -> Any:
    return json.loads(ip("-json", *arguments, namespace=namespace) or "[]")


def tc_json(*arguments: str, namespace: str | None = None) -> Any:
    return json.loads(tc("-json", *arguments, namespace=namespace) or "[]")


def add_namespace(name: str) -> None:
    """Create a network namespace."""
    # In a user namespace `ip` starts in a network that it may return to.
    start = [_path("unshare") or "unshare", "--net"] if in_user_namespace() else []
    _run("ip", ["netns", "add", name], None, start)


def inside(namespace: str) -> list[str]:
    """The start of a command line for what runs in a network namespace, in a user namespace."""
    return [_path("nsenter") or "nsenter", f"--net={NAMESPACES / namespace}"]


def _run(tool: str, arguments: Sequence[str], namespace: str | None, start: Sequence[str] = ()) -> str:
    named = ["-n", namespace, *arguments] if namespace else list(arguments)
    command = [*start, _path(tool) or tool, *named]
    if namespace and in_user_namespace():
        command = [*inside(namespace), _path(tool) or tool, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{tool} {' '.join(named)}: {error}") from None
    if done.returncode:
        raise NetworkError(f"{tool} {' '.join(named)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _path(tool: str) -> str | None:
    # /sbin is not on every user's PATH.
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
