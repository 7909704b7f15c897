"""The tools of iproute2: `ip` and `tc`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from gradsieve.lab.network.errors import NetworkError

TIMEOUT_SECONDS = 30.0


def require_tools() -> None:
    """Raise an error that names what is missing: Linux, root, or a tool."""
    if not sys.platform.startswith("linux"):
        raise NetworkError(f"the network laboratory needs Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise NetworkError("the network laboratory needs root, to create network namespaces: run it with sudo")
    for tool in ("ip", "tc"):
        if _path(tool) is None:
            raise NetworkError(f"the network laboratory needs the command {tool!r}: install iproute2")


def ip(*arguments: str) -> str:
    """Run `ip` and return its output."""
    return _run("ip", *arguments)


def tc(*arguments: str) -> str:
    """Run `tc` and return its output."""
    return _run("tc", *arguments)


def ip_json(*arguments: str) -> Any:
    return json.loads(ip("-json", *arguments) or "[]")


def tc_json(*arguments: str) -> Any:
    return json.loads(tc("-json", *arguments) or "[]")


def _run(tool: str, *arguments: str) -> str:
    command = [_path(tool) or tool, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{tool} {' '.join(arguments)}: {error}") from None
    if done.returncode:
        raise NetworkError(f"{tool} {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _path(tool: str) -> str | None:
    # /sbin is not on every user's PATH.
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
