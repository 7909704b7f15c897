"""Where the ranks of a benchmark run: over loopback, or each in its own host on limited links."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from gradsieve.lab.network import Network, NetworkError
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


def obstacle() -> str | None:
    """Why no network can be built here, or None if one can: it is tried with a single host.

    Root alone does not suffice: most containers may not create namespaces.
    """
    try:
        with Network(1, name=f"trial-{os.getpid()}"):
            return None
    except NetworkError as error:
        return str(error)


def run_on(
    network: str,
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    on_report: Tell | None = None,
    name: str | None = None,
) -> list[Any]:
    """Run `work(process, *arguments)` on every rank and return the results in rank order.

    `name` is that of the network, if it is not one of the benchmarks'.
    """
    if network == LOOPBACK:
        return run_rank_processes(ranks, work, *arguments, on_report=on_report)
    rate, latency = split_profile(network)
    with Network(ranks, rate, latency=latency, name=name or NETWORK_NAME) as hosts:
        return hosts.run_rank_processes(work, *arguments, on_report=on_report)
