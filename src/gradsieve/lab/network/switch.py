"""The parts of one network: a switch namespace with a bridge, one namespace per host, one link to each host.

Every interface is created inside the namespaces, so the machine's own network is never touched. The interfaces
disappear with the namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from gradsieve.lab.network import relay
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.host import Host
from gradsieve.lab.network.iproute import add_namespace, ip
from gradsieve.lab.network.link import Link
from gradsieve.lab.network.topology import INTERFACE, SUBNET, Topology

PREFIX = "gradsieve"
BRIDGE = "bridge"
RELAY_START_SECONDS = 30.0


@dataclass(frozen=True)
class Site:
    """The names of one network's parts. They contain a random identity, so no other network has the same names."""

    identity: str
    topology: Topology

    @property
    def switch(self) -> str:
        """The switch's namespace."""
        return f"{PREFIX}-{self.identity}-switch"

    @property
    def hosts(self) -> list[Host]:
        """All hosts, in rank order."""
        return [Host(f"{PREFIX}-{self.identity}-host{number}") for number in range(self.topology.hosts)]

    def link(self, host: int) -> Link:
        self.topology.check_host(host)
        return Link(self.hosts[host].namespace, self.switch, f"port{host}")

    def build(self) -> None:
        """Create all parts. After a failure some of them may exist: `demolish` removes those."""
        add_namespace(self.switch)
        # No spanning tree and no multicast snooping: the bridge itself sends no frames.
        quiet = ["stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
        ip("link", "add", BRIDGE, "type", "bridge", *quiet, namespace=self.switch)
        self._raise(BRIDGE)
        for number in range(self.topology.hosts):
            self._build_host(number)

    def demolish(self) -> None:
        """End all processes inside and remove all parts. Also safe if some or all parts are gone."""
        problems = []
        for part in [*self.hosts, Host(self.switch)]:
            try:
                part.empty()
                if part.exists():
                    ip("netns", "delete", part.namespace)
            except NetworkError as error:
                problems.append(str(error))
        if problems:
            raise NetworkError("not everything could be removed: " + "; ".join(problems))

    def _build_host(self, number: int) -> None:
        host, link = self.hosts[number].namespace, self.link(number)
        add_namespace(host)
        ip("link", "set", "lo", "up", namespace=host)
        far_end = ["peer", "name", link.port, "netns", self.switch]
        # Made from inside: a user namespace may not touch the machine's own network.
        ip("link", "add", INTERFACE, "type", "veth", *far_end, namespace=host)
        ip("link", "set", INTERFACE, "addrgenmode", "none", namespace=host)
        ip("address", "add", f"{self.topology.address(number)}/{SUBNET.prefixlen}", "dev", INTERFACE, namespace=host)
        link.set_rate(self.topology.rates[number])
        ip("link", "set", INTERFACE, "up", namespace=host)
        self._raise(link.port)
        inner = self._start_relay(number, link.port) if self.topology.latency_seconds else link.port
        ip("link", "set", inner, "master", BRIDGE, namespace=self.switch)

    def _start_relay(self, number: int, port: str) -> str:
        """Start a relay with half of the latency: a frame passes two. Returns the interface to attach to the bridge."""
        on_bridge, inner = f"tap{number}", f"tap{number}"
        if not os.access(relay.TUN, os.R_OK | os.W_OK):
            on_bridge, inner = f"outer{number}", f"inner{number}"
            ip("link", "add", on_bridge, "type", "veth", "peer", "name", inner, namespace=self.switch)
            self._raise(inner)
        delay = str(self.topology.latency_seconds / 2)
        command = Host(self.switch).command([sys.executable, "-I", "-S", str(relay.__file__), port, inner, delay])
        started = subprocess.run(
            command, capture_output=True, text=True, timeout=RELAY_START_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
        if started.returncode:
            reason = (started.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise NetworkError(f"latency cannot be added on this machine: {reason}")
        self._raise(on_bridge)
        return on_bridge

    def _raise(self, interface: str) -> None:
        """Bring an interface up, without automatic IPv6 addresses: their announcements would be counted as traffic."""
        ip("link", "set", interface, "addrgenmode", "none", namespace=self.switch)
        ip("link", "set", interface, "up", namespace=self.switch)
