"""One command, run in several hosts at once: output line by line, all ended when one fails."""

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
"""Called with the host, a line of its output, and whether the line came from stderr."""


def rank_environment(site: Site, host: int, port: int = DEFAULT_PORT) -> dict[str, str]:
    """Environment variables for torch's `env://` and for Gloo's interface."""
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
    """Run the command in these hosts. Returns the exit code of the first one to fail, or 0.

    However this ends, nothing it started is left running, including background processes of the commands.
    """
    if not command:
        raise InputError("no command to run: gradsieve lab run -- python train.py")
    commands = _Commands(on_line)
    try:
        with held_back(signal.SIGINT, signal.SIGTERM):
            for host in hosts:
                environment = {**os.environ, **rank_environment(site, site.topology.check_host(host), port)}
                commands.start(host, site.hosts[host].command(list(command)), environment)
        return commands.first_failure()
    finally:
        commands.stop()


class _Commands:
    """The processes, each the leader of its own process group, and the threads that read their output."""

    def __init__(self, on_line: Line) -> None:
        self.on_line = on_line
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.output_lock = threading.Lock()

    def start(self, host: int, command: list[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        # In its own session: the terminal sends Ctrl-C only to us, and we end the processes.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_unblock_signals,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            reader = threading.Thread(target=self._read, args=(host, stream, is_error), daemon=True)
            reader.start()
            self.readers.append(reader)
        threading.Thread(target=self._wait_for, args=(process.pid,), daemon=True).start()

    def first_failure(self) -> int:
        for _ in self.processes:
            code = self.ended.get()
            if code:
                return code
        return 0

    def stop(self) -> None:
        """End all process groups: SIGTERM first, then SIGKILL.

        Group leaders are not reaped before that, so no other process can have their ids.
        """
        with held_back(signal.SIGINT, signal.SIGTERM):
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while self._running() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._signal(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            for reader in self.readers:
                reader.join(GRACE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _running(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return any(os.waitid(os.P_PID, process.pid, options) is None for process in self.processes)

    def _wait_for(self, process: int) -> None:
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            by_itself = ended.si_code == os.CLD_EXITED
            self.ended.put(ended.si_status if by_itself else 128 + ended.si_status)

    def _read(self, host: int, stream: IO[str], is_error: bool) -> None:
        with stream:
            for line in stream:
                with self.output_lock:
                    self.on_line(host, line.rstrip("\n"), is_error)


def _unblock_signals() -> None:
    """The parent blocks these signals while it starts processes. The processes must not inherit that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
