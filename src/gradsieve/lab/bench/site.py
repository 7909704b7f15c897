"""Where a benchmark puts its ranks: on this machine as it is, or each in a host of its own on limited links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gradsieve.lab.network import Network
from gradsieve.lab.network.iproute import require_tools
from gradsieve.lab.network.topology import Topology, split_profile
from gradsieve.lab.workers import Tell, run_workers

LOOPBACK = "loopback"
NETWORK_NAME = "bench"  # two at a time would measure each other


def check_networks(networks: Iterable[str], ranks: int) -> None:
    """Whatever is wrong with a name, or missing on this machine, is an error now and not after minutes."""
    for network in networks:
        if network != LOOPBACK:
            rate, latency = split_profile(network)
            Topology.of(ranks, rate, latency=latency)
            require_tools()


def run_on(
    network: str, ranks: int, work: Callable[..., Any], *arguments: Any, on_report: Tell | None = None
) -> list[Any]:
    """What `work(worker, *arguments)` gives on every rank."""
    if network == LOOPBACK:
        return run_workers(ranks, work, *arguments, on_report=on_report)
    rate, latency = split_profile(network)
    with Network(ranks, rate, latency=latency, name=NETWORK_NAME) as hosts:
        return hosts.run_workers(work, *arguments, on_report=on_report)
