"""The guard of a space: a small process that keeps the space alive, and empties it in the end.

A namespace exists while a process is in it. The guard stays while the process that made the space (its owner) runs, and
after that as long as a network in the space is up or in use. Then it ends what a killed process left running in the
space's networks, and ends itself. So a killed owner leaves nothing behind but its state file.

Run as a script inside the space: `guard.py DESCRIPTOR`, with a pidfd of the owner. It prints the id of the guard's
process, which continues in the background.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

STATES = Path("/run/gradsieve")
NAMESPACES = Path("/run/netns")
POLL_SECONDS = 0.2


def wait_for_owner(owner: int) -> None:
    waiting = select.poll()
    waiting.register(owner, select.POLLIN)
    waiting.poll()
    os.close(owner)


def is_needed() -> bool:
    """Whether a network of this space is up or in use."""
    return any(
        (claim["stays"] and claim["complete"]) or is_alive(claim["process"])
        for claim in claims()
        if (NAMESPACES / f"gradsieve-{claim['identity']}-switch").exists()
    )


def claims() -> Iterator[dict[str, Any]]:
    """The content of the state files of all spaces of this user."""
    for path in STATES.glob("*.json"):
        with suppress(OSError, ValueError):
            yield json.loads(path.read_text())


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes() -> set[int]:
    """Ids of the processes in the networks of this space."""
    inside = {path.stat().st_ino for path in NAMESPACES.iterdir()} if NAMESPACES.exists() else set()
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # it has ended, or is another user's
            if path.stat().st_ino in inside:
                found.add(int(path.parts[2]))
    return found


def empty() -> None:
    """Kill the processes that a killed owner left running."""
    while left := processes():
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 10)


def main() -> None:
    owner = int(sys.argv[1])
    process = os.fork()
    if process:
        print(process, flush=True)
        os._exit(0)
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    wait_for_owner(owner)
    while is_needed():
        time.sleep(POLL_SECONDS)
    empty()


if __name__ == "__main__":
    main()
