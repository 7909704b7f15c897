"""A laboratory network: for the duration of a `with` block, or until `gradsieve lab down`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gradsieve.errors import InputError
from gradsieve.lab.interrupts import held_back
from gradsieve.lab.network.claim import Claim, check_name, held, read_claim
from gradsieve.lab.network.counters import Counters
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.host import Host
from gradsieve.lab.network.iproute import require_networks
from gradsieve.lab.network.link import Link
from gradsieve.lab.network.switch import Site
from gradsieve.lab.network.topology import INTERFACE, Topology
from gradsieve.lab.rank_processes import TIMEOUT_SECONDS, Tell, Work, run_rank_processes

DEFAULT_NAME = "lab"


@dataclass(frozen=True)
class EnterHost:
    """Moves a rank process into its host, before it opens a socket. A `JoinNetwork` for `run_rank_processes`."""

    hosts: tuple[Host, ...]

    def __call__(self, rank: int) -> str:
        self.hosts[rank].enter()
        return INTERFACE


class Network:
    """Hosts on limited links, for the duration of the `with` block.

    >>> with Network(hosts=4, rate="1gbit", host_rates={3: "100mbit"}) as network:
    ...     results = network.run_rank_processes(work, argument)
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: str = "1gbit",
        *,
        host_rates: Mapping[int, str] | None = None,
        latency: str | None = None,
        name: str = DEFAULT_NAME,
    ) -> None:
        self.topology = Topology.of(hosts, rate, host_rates, latency)
        self.name = check_name(name)
        self._site: Site | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        require_networks()
        try:
            with held_back(signal.SIGINT, signal.SIGTERM), ExitStack() as cleanup:
                cleanup.enter_context(held(self.name))
                claim = build(self.name, self.topology, stays=False)
                cleanup.callback(remove, claim)
                self._site = claim.site
                self._cleanup = cleanup.pop_all()
        except BaseException:  # also a signal that was held back until the network was complete
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        with held_back(signal.SIGINT, signal.SIGTERM):
            self._cleanup.close()
            self._site = None

    @property
    def site(self) -> Site:
        """The network's parts; an error outside the `with` block."""
        if self._site is None:
            raise InputError("a Network exists only within its `with` block")
        return self._site

    def run_rank_processes(
        self,
        work: Work,
        *arguments: Any,
        on_report: Tell | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> list[Any]:
        """`rank_processes.run_rank_processes` with one rank in each host.

        `on_report` runs in the calling process, outside the hosts, so it may change links.
        """
        return run_rank_processes(
            self.topology.hosts,
            work,
            *arguments,
            on_report=on_report,
            join_network=EnterHost(tuple(self.site.hosts)),
            timeout_seconds=timeout_seconds,
        )

    def link(self, host: int) -> Link:
        """The link of one host: `down`, `up`, `drop`, `set_rate`."""
        return self.site.link(host)

    def vanish(self, host: int) -> None:
        """Take a host down for good and kill everything that runs in it."""
        vanish(self.site, host)

    def counters(self) -> list[Counters]:
        """Counters of every host's interface, in rank order."""
        return [host.counters() for host in self.site.hosts]


def build(name: str, topology: Topology, *, stays: bool) -> Claim:
    """Build a laboratory; the caller holds its lock. Remove what a dead process left under this name first."""
    known = read_claim(name)
    if known is not None and known.is_up:
        raise NetworkError(f"the laboratory {name!r} is up already: gradsieve lab down{_option(name)} removes it")
    if known is not None:
        remove(known)
    claim = Claim.fresh(name, topology, stays=stays)
    claim.write()
    try:
        claim.site.build()
    except BaseException:
        remove(claim)
        raise
    claim = claim.completed()
    claim.write()
    return claim


def remove(claim: Claim) -> None:
    """Remove everything a claim lists, then the claim."""
    claim.site.demolish()
    claim.forget()


def vanish(site: Site, host: int) -> None:
    """Take the link down first, so that no peer sees its connections close, then kill everything in the host."""
    site.link(host).down()
    site.hosts[host].kill()


def standing(name: str) -> Claim:
    """The laboratory that `lab up` built; an error that says how to build it if there is none."""
    claim = read_claim(check_name(name))
    if claim is None or not claim.complete or not claim.is_reachable:
        raise NetworkError(f"the laboratory {name!r} is not up: gradsieve lab up{_option(name)} builds it")
    if claim.is_elsewhere:
        raise NetworkError(f"the laboratory {name!r} is in another space: use it outside of `gradsieve lab enter`")
    return claim


def _option(name: str) -> str:
    return "" if name == DEFAULT_NAME else f" --name {name}"
