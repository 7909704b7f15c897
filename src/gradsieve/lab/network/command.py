"""A command run in several hosts at once: output line by line, all ended when one fails."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from gradsieve.errors import InputError
from gradsieve.lab.interrupts import held_back
from gradsieve.lab.network.switch import Site
from gradsieve.lab.network.topology import INTERFACE

DEFAULT_PORT = 29500
GRACE_SECONDS = 5.0

Line = Callable[[int, str, bool], None]
"""Told the host, a line of its output, and whether it came from stderr."""


def rank_environment(site: Site, host: int, port: int = DEFAULT_PORT) -> dict[str, str]:
    """What torch's `env://` needs, and which interface to use."""
    return {
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(site.topology.hosts),
        "MASTER_ADDR": site.topology.address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def run_command(
    site: Site, command: Sequence[str], hosts: Sequence[int], on_line: Line, port: int = DEFAULT_PORT
) -> int:
    """Run it in these hosts to its end; the exit code of whichever failed first, 0 if none did.

    However this ends, nothing it started is left running: also what the commands themselves put in the background.
    """
    if not command:
        raise InputError("no command to run: gradsieve lab run -- python train.py")
    crew = _Crew(on_line)
    try:
        with held_back(signal.SIGINT, signal.SIGTERM):
            for host in hosts:
                environment = {**os.environ, **rank_environment(site, site.topology.check_host(host), port)}
                crew.start(host, site.hosts[host].command(list(command)), environment)
        return crew.first_failure()
    finally:
        crew.dismiss()


class _Crew:
    """The processes, each the leader of its own group, and the threads that listen to them."""

    def __init__(self, on_line: Line) -> None:
        self.on_line = on_line
        self.processes: list[subprocess.Popen[str]] = []
        self.listeners: list[threading.Thread] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.speaking = threading.Lock()

    def start(self, host: int, command: list[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C comes to us only, and we pass it on.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_hear_signals,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            listener = threading.Thread(target=self._listen, args=(host, stream, is_error), daemon=True)
            listener.start()
            self.listeners.append(listener)
        threading.Thread(target=self._await, args=(process.pid,), daemon=True).start()

    def first_failure(self) -> int:
        for _ in self.processes:
            code = self.ended.get()
            if code:
                return code
        return 0

    def dismiss(self) -> None:
        """End all groups, politely first. Leaders are not reaped before, so their numbers are still theirs."""
        with held_back(signal.SIGINT, signal.SIGTERM):
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while self._running() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._signal(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            for listener in self.listeners:
                listener.join(GRACE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _running(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return any(os.waitid(os.P_PID, process.pid, options) is None for process in self.processes)

    def _await(self, process: int) -> None:
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            by_itself = ended.si_code == os.CLD_EXITED
            self.ended.put(ended.si_status if by_itself else 128 + ended.si_status)

    def _listen(self, host: int, stream: IO[str], is_error: bool) -> None:
        with stream:
            for line in stream:
                with self.speaking:
                    self.on_line(host, line.rstrip("\n"), is_error)


def _hear_signals() -> None:
    """What we hold back while starting must not stay blocked in what we start."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
