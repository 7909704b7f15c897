"""Where the ranks of a benchmark run: over loopback, or each in its own host on limited links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gradsieve.lab.network import Network
from gradsieve.lab.network.iproute import require_networks
from gradsieve.lab.network.topology import Topology, split_profile
from gradsieve.lab.rank_processes import Tell, run_rank_processes

LOOPBACK = "loopback"
NETWORK_NAME = "bench"  # one name for all benchmarks: two at a time would disturb each other


def check_networks(networks: Iterable[str], ranks: int) -> None:
    """Raise an error for a wrong network name or a missing tool, before anything is measured."""
    for network in networks:
        if network != LOOPBACK:
            rate, latency = split_profile(network)
            Topology.of(ranks, rate, latency=latency)
            require_networks()


def run_on(
    network: str, ranks: int, work: Callable[..., Any], *arguments: Any, on_report: Tell | None = None
) -> list[Any]:
    """Run `work(process, *arguments)` on every rank and return the results in rank order."""
    if network == LOOPBACK:
        return run_rank_processes(ranks, work, *arguments, on_report=on_report)
    rate, latency = split_profile(network)
    with Network(ranks, rate, latency=latency, name=NETWORK_NAME) as hosts:
        return hosts.run_rank_processes(work, *arguments, on_report=on_report)
