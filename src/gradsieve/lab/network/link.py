"""The link between a host and the switch: its rate, and faults on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gradsieve.lab.network.iproute import ip, ip_json, tc, tc_json
from gradsieve.lab.network.rate import Rate
from gradsieve.lab.network.topology import INTERFACE


@dataclass(frozen=True)
class Link:
    """Both ends: the host's interface and the switch's port. Changes take effect immediately, also while ranks run."""

    host_namespace: str
    switch_namespace: str
    port: str

    def down(self) -> None:
        """Pull the cable. Packets are lost silently, as on a real network. Connections stay open and wait."""
        ip("link", "set", self.port, "down", namespace=self.switch_namespace)

    def up(self) -> None:
        """Plug the cable in again."""
        ip("link", "set", self.port, "up", namespace=self.switch_namespace)

    def drop(self, seconds: float) -> None:
        """Take the link down for some seconds. It comes up again even after an interrupt."""
        self.down()
        try:
            time.sleep(seconds)
        finally:
            self.up()

    def set_rate(self, rate: str | Rate) -> None:
        """Limit both directions, each at its sender."""
        limit = rate if isinstance(rate, Rate) else Rate.parse(rate)
        for namespace, interface in self._ends():
            ip("link", "set", interface, "gso_max_size", str(limit.packet_bytes), namespace=namespace)
            if limit.bucket:
                tc("qdisc", "replace", "dev", interface, "root", *limit.bucket, namespace=namespace)
            elif self._bucket(namespace, interface):
                tc("qdisc", "del", "dev", interface, "root", namespace=namespace)

    def rate(self) -> Rate:
        """The current limit from the host to the switch, as the kernel reports it."""
        bucket = self._bucket(self.host_namespace, INTERFACE)
        return Rate(bucket["options"]["rate"] * 8 if bucket else None)

    def is_up(self) -> bool:
        (port,) = ip_json("link", "show", "dev", self.port, namespace=self.switch_namespace)
        return "UP" in port["flags"]

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.host_namespace, INTERFACE), (self.switch_namespace, self.port)

    def _bucket(self, namespace: str, interface: str) -> dict[str, Any] | None:
        shown = tc_json("qdisc", "show", "dev", interface, namespace=namespace)
        return next((entry for entry in shown if entry.get("kind") == "tbf"), None)
