"""`gradsieve lab run`: a command in every host of a laboratory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gradsieve.cli.lab_options import LinksOptions, links_options, name_option
from gradsieve.cli.lab_space import enter_space, join_space
from gradsieve.cli.parsing import parsed_into

if TYPE_CHECKING:
    from gradsieve.lab.network.counters import Counters
    from gradsieve.lab.network.switch import Site


@dataclass(frozen=True, kw_only=True)
class LabRunOptions(LinksOptions):
    """Parsed options of `gradsieve lab run`."""

    only: tuple[int, ...]  # hosts to run in; empty for all
    port: int
    hosts: int | None  # None uses the network that is up
    name: str
    command: tuple[str, ...]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--host", "only", type=int, multiple=True, metavar="N", help="Run only in this host; repeatable.  [default: all]"
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=29500,
    show_default=True,
    metavar="PORT",
    help="Port to set as MASTER_PORT.",
)
@click.option(
    "--hosts", type=click.IntRange(min=1), metavar="N", help="Build a network with N hosts, for this run only."
)
@links_options
@name_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@parsed_into(LabRunOptions)
def run(options: LabRunOptions) -> int:
    """Run COMMAND in every host.

    Sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, for torch's init_method env://. When the
    command fails in one host, it is ended in all hosts, and its exit code is returned.

    \b
    Example:
      gradsieve lab run -- python train.py
    """
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.network.command import run_command

    if options.hosts is None:
        join_space(options.name)
    else:
        enter_space()
    with termination_unwinds(), ExitStack() as stack:
        site = _site(options, stack)
        hosts = sorted(set(options.only)) or list(range(site.topology.hosts))
        before = {host: site.hosts[site.topology.check_host(host)].counters() for host in hosts}
        started = time.monotonic()
        try:
            code = run_command(site, options.command, hosts, _print_line, options.port)
        finally:
            _print_traffic(site, before, time.monotonic() - started)
    return code


def _site(options: LabRunOptions, stack: ExitStack) -> Site:
    """The network that is up, locked until `stack` closes, or a new one that `stack` removes."""
    from gradsieve.lab.network.claim import held
    from gradsieve.lab.network.network import Network, standing

    if options.hosts is None:
        standing(options.name)  # raises if it is not up, before a lock file is created
        # Runs in some of the hosts share the laboratory. A run in all hosts has it alone.
        stack.enter_context(held(options.name, shared=bool(options.only)))
        return standing(options.name).site
    network = Network(
        options.hosts, options.rate, host_rates=options.host_rates, latency=options.latency, name=options.name
    )
    return stack.enter_context(network).site


def _print_line(host: int, line: str, is_error: bool) -> None:
    click.echo(f"[{host}] {line}", err=is_error)


def _print_traffic(site: Site, before: dict[int, Counters], seconds: float) -> None:
    click.echo(f"{seconds:.1f} s", err=True)
    for host, then in before.items():
        moved = site.hosts[host].counters().since(then)
        click.echo(
            f"host {host}: received {moved.bytes_received:,} bytes, sent {moved.bytes_sent:,} bytes "
            f"({site.link(host).rate()})",
            err=True,
        )
