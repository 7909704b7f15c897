"""Laboratories for tests: skipped with the reason where none can be built; never anything left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest

from gradsieve.lab.network import Network, NetworkError
from gradsieve.lab.network.iproute import ip, require_tools


def check_interrupted(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a command that prints `ready`. It ends by the signal, without a traceback."""
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said


def unique_name() -> str:
    """Tests of several people on one machine must not meet."""
    return f"test-{os.getpid()}"


@cache
def reason_without_networks() -> str:
    """Empty where a network can be built."""
    try:
        with Network(1, "1gbit", name=unique_name()):
            return ""
    except NetworkError as error:
        return str(error)


def require_networks() -> None:
    if reason := reason_without_networks():
        pytest.skip(reason)


def namespaces() -> set[str]:
    """All namespaces of this machine, whoever made them."""
    require_tools()
    return {line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()}


def interfaces() -> set[str]:
    shown = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True, timeout=20).stdout
    return {line.split()[0] for line in shown.splitlines()}


def state_files() -> set[Path]:
    """State, draft and lock."""
    return set(Path("/run/gradsieve").glob(f"{unique_name()}*"))
