"""What a network looks like: how many hosts, and how fast the link of each is."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.network.rate import Rate

SUBNET = ipaddress.ip_network("198.18.0.0/15")  # set aside for benchmarks, routed nowhere
MOST_HOSTS = 64
INTERFACE = "eth0"


@dataclass(frozen=True)
class Topology:
    """Hosts on one switch, each by one link."""

    rates: tuple[str, ...]  # of each host's link, in both directions

    @classmethod
    def of(cls, hosts: int, rate: str, host_rates: Mapping[int, str] | None = None) -> Topology:
        """All alike, but for those named in `host_rates`."""
        if not 1 <= hosts <= MOST_HOSTS:
            raise InputError(f"hosts must be between 1 and {MOST_HOSTS}, got {hosts}")
        others = host_rates or {}
        for host in others:
            if not 0 <= host < hosts:
                raise InputError(f"there is no host {host} to give a rate: hosts are 0 to {hosts - 1}")
        return cls(tuple(str(Rate.parse(others.get(host, rate))) for host in range(hosts)))

    @property
    def hosts(self) -> int:
        """How many."""
        return len(self.rates)

    def address(self, host: int) -> str:
        """The host's address; the network's length is that of `SUBNET`."""
        return str(SUBNET[host + 1])

    def check_host(self, host: int) -> int:
        """A host that is not there is an error."""
        if not 0 <= host < self.hosts:
            raise InputError(f"there is no host {host}: hosts are 0 to {self.hosts - 1}")
        return host

    def to_json(self) -> dict[str, Any]:
        """As state files hold it."""
        return asdict(self)

    def __str__(self) -> str:
        usual = max(self.rates, key=self.rates.count)  # of several the first
        odd = ", ".join(f"host {host} {rate}" for host, rate in enumerate(self.rates) if rate != usual)
        return f"{self.hosts} hosts at {usual}" + (f" ({odd})" if odd else "")
