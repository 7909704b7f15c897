"""A host: a network namespace and the processes in it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from gradsieve.lab.network.counters import Counters
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.iproute import NAMESPACES, inside, ip, ip_json
from gradsieve.lab.network.privilege import in_user_namespace
from gradsieve.lab.network.syscalls import NEW_NETWORK, setns
from gradsieve.lab.network.topology import INTERFACE

GRACE_SECONDS = 3.0
SEE_AND_RUN = 'mount -t sysfs sysfs /sys 2>/dev/null; exec "$@"'


@dataclass(frozen=True)
class Host:
    """A network namespace by its name."""

    namespace: str

    def enter(self) -> None:
        """Move the calling thread into the host. Only threads and sockets that it creates later are inside too."""
        try:
            descriptor = os.open(NAMESPACES / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NetworkError(f"cannot enter {self.namespace}: {error.strerror}: is the laboratory up?") from None
        try:
            setns(descriptor, NEW_NETWORK)
        except OSError as error:
            raise NetworkError(f"cannot enter {self.namespace}: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def command(self, command: list[str]) -> list[str]:
        """The command line that runs `command` inside the host."""
        if not in_user_namespace():
            return ["ip", "netns", "exec", self.namespace, *command]
        # The same in three steps, the last of which a container may forbid: a /sys that shows the host's interfaces.
        apart = ["unshare", "--mount", "--propagation", "slave"]
        return [*inside(self.namespace), *apart, "sh", "-c", SEE_AND_RUN, "sh", *command]

    def counters(self) -> Counters:
        """Counts of the host's interface; can be called from outside the host."""
        (link,) = ip_json("-s", "link", "show", "dev", INTERFACE, namespace=self.namespace)
        received, sent = link["stats64"]["rx"], link["stats64"]["tx"]
        return Counters(received["bytes"], received["packets"], sent["bytes"], sent["packets"])

    def exists(self) -> bool:
        return (NAMESPACES / self.namespace).exists()

    def processes(self) -> list[int]:
        """Ids of the processes inside."""
        return [int(line) for line in ip("netns", "pids", self.namespace).split()] if self.exists() else []

    def kill(self) -> None:
        """End everything inside at once, as a power cut would."""
        self._signal(signal.SIGKILL)

    def empty(self) -> None:
        """End all processes inside, by SIGTERM and then SIGKILL: a namespace exists until its last process ends."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError, PermissionError):
                self._signal_one(process, number)

    def _signal_one(self, process: int, number: int) -> None:
        """Signal through a pidfd: by now, the id may belong to another process."""
        handle = os.pidfd_open(process)
        try:
            inside = os.stat(NAMESPACES / self.namespace).st_ino == os.stat(f"/proc/{process}/ns/net").st_ino
            if inside and process != os.getpid():
                signal.pidfd_send_signal(handle, number)
        except FileNotFoundError:
            pass
        finally:
            os.close(handle)
