"""`gradsieve lab`: a network of hosts on slow links, on this machine."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import click

from gradsieve.cli.lab_enter import enter
from gradsieve.cli.lab_options import LinksOptions, links_options, name_option
from gradsieve.cli.lab_run import run
from gradsieve.cli.lab_space import enter_space, join_space
from gradsieve.cli.lab_status import status
from gradsieve.cli.parsing import count_option, parsed_into
from gradsieve.errors import InputError


@click.group()
def lab() -> None:
    """Build slow networks on this machine (Linux).

    The hosts of a network are network namespaces. Without root they are built in a user namespace.
    """


lab.add_command(run)
lab.add_command(status)
lab.add_command(enter)


@dataclass(frozen=True, kw_only=True)
class LabUpOptions(LinksOptions):
    """Parsed options of `gradsieve lab up`."""

    hosts: int
    name: str


@lab.command()
@count_option("--hosts", default=4, help="Number of hosts.")
@links_options
@name_option
@parsed_into(LabUpOptions)
def up(options: LabUpOptions) -> None:
    """Build a network that stays until `gradsieve lab down`.

    \b
    Example:
      gradsieve lab up --hosts 4 --rate 1gbit --slow-host 3=100mbit
    """
    from gradsieve.lab.interrupts import held_back
    from gradsieve.lab.network.claim import held
    from gradsieve.lab.network.network import build
    from gradsieve.lab.network.topology import Topology

    topology = Topology.of(options.hosts, options.rate, options.host_rates, options.latency)
    enter_space()
    with held_back(signal.SIGINT, signal.SIGTERM), held(options.name):
        build(options.name, topology, stays=True)
    click.echo(f"{topology}: {topology.address(0)} to {topology.address(topology.hosts - 1)}")


@dataclass(frozen=True)
class LabDownOptions:
    """Parsed options of `gradsieve lab down`."""

    name: str
    everything: bool


@lab.command()
@name_option
@click.option("--all", "everything", is_flag=True, help="Remove every laboratory that is not in use.")
@parsed_into(LabDownOptions)
def down(options: LabDownOptions) -> None:
    """Remove a network and end the processes in its hosts.

    This also removes the remains of a killed run.
    """
    from gradsieve.lab.interrupts import held_back
    from gradsieve.lab.network.claim import held, is_held, known_names, read_claim
    from gradsieve.lab.network.iproute import require_tools
    from gradsieve.lab.network.remains import retire

    require_tools()
    names = [name for name in known_names() if not is_held(name)] if options.everything else [options.name]
    for name in names:
        with held_back(signal.SIGINT, signal.SIGTERM), held(name):
            claim = read_claim(name)
            if claim is not None:
                retire(claim)
        click.echo(f"{name}: removed" if claim is not None else f"{name}: nothing to remove")


@dataclass(frozen=True)
class LabLinkOptions:
    """Parsed options of `gradsieve lab link`."""

    host: int
    action: str
    value: str | None
    name: str


@lab.command()
@click.argument("host", type=int)
@click.argument("action", type=click.Choice(["down", "up", "rate", "drop", "vanish"]))
@click.argument("value", required=False)
@name_option
@parsed_into(LabLinkOptions)
def link(options: LabLinkOptions) -> None:
    """Change the link of a host, also while ranks run.

    \b
    down           take the link down
    up             bring the link up
    drop SECONDS   take the link down, and bring it up after this time
    rate RATE      set the rate in both directions
    vanish         take the link down for good, and kill the processes in the host
    """
    from gradsieve.lab.network.network import standing, vanish

    action, value = options.action, options.value
    if (value is None) == (action in ("rate", "drop")):
        raise InputError(f"link {action} takes {'a value' if value is None else 'no value'}: gradsieve lab link --help")
    join_space(options.name)
    site = standing(options.name).site
    cable = site.link(options.host)
    if action == "down":
        cable.down()
    elif action == "up":
        cable.up()
    elif action == "rate":
        cable.set_rate(str(value))
    elif action == "drop":
        cable.drop(_seconds(str(value)))
    else:
        vanish(site, options.host)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise InputError(f"seconds must be between 0 and 3600, got {value}")
    return seconds
