"""The shape of a network: how many hosts, and the rate of each host's link."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.network.rate import Rate

SUBNET = ipaddress.ip_network("198.18.0.0/15")  # reserved for benchmarks, never routed
MOST_HOSTS = 64
INTERFACE = "eth0"
LATENCY_FORM = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
LATENCY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_LATENCY_SECONDS = 2.0


@dataclass(frozen=True)
class Topology:
    """Hosts on one switch, each connected by one link."""

    rates: tuple[str, ...]  # of each host's link, per direction
    latency_seconds: float = 0.0  # added one-way latency between two hosts

    @classmethod
    def of(
        cls, hosts: int, rate: str, host_rates: Mapping[int, str] | None = None, latency: str | None = None
    ) -> Topology:
        """All hosts have `rate`, except those in `host_rates`. The latency is text such as `5ms`."""
        if not 1 <= hosts <= MOST_HOSTS:
            raise InputError(f"hosts must be between 1 and {MOST_HOSTS}, got {hosts}")
        others = host_rates or {}
        for host in others:
            if not 0 <= host < hosts:
                raise InputError(f"there is no host {host} to give a rate: hosts are 0 to {hosts - 1}")
        rates = tuple(str(Rate.parse(others.get(host, rate))) for host in range(hosts))
        return cls(rates, 0.0 if latency is None else _latency_seconds(latency))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.rates)

    def address(self, host: int) -> str:
        """The host's address in `SUBNET`."""
        return str(SUBNET[host + 1])

    def check_host(self, host: int) -> int:
        """Return the host if it exists, raise otherwise."""
        if not 0 <= host < self.hosts:
            raise InputError(f"there is no host {host}: hosts are 0 to {self.hosts - 1}")
        return host

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        usual = max(self.rates, key=self.rates.count)  # the first one if several are equally frequent
        odd = ", ".join(f"host {host} {rate}" for host, rate in enumerate(self.rates) if rate != usual)
        late = f", {self.latency_seconds * 1e3:g} ms apart" if self.latency_seconds else ""
        return f"{self.hosts} hosts at {usual}" + (f" ({odd})" if odd else "") + late


def split_profile(profile: str) -> tuple[str, str | None]:
    """Split `1gbit` or `1gbit+5ms` into rate and latency."""
    rate, plus, latency = profile.partition("+")
    return rate, latency if plus else None


def _latency_seconds(text: str) -> float:
    found = LATENCY_FORM.fullmatch(text)
    seconds = float(found[1]) * LATENCY_UNITS[found[2]] if found else -1.0
    if not 0 <= seconds <= MOST_LATENCY_SECONDS:
        raise InputError(f"latency must be between 0ms and {MOST_LATENCY_SECONDS:g}s, such as 5ms, got {text!r}")
    return seconds
