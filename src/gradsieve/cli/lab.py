"""`gradsieve lab`: hosts on slow links on this machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradsieve.cli.parsing import count
from gradsieve.errors import InputError

if TYPE_CHECKING:
    from gradsieve.lab.network.claim import Claim
    from gradsieve.lab.network.counters import Counters
    from gradsieve.lab.network.switch import Site

F = TypeVar("F", bound=Callable[..., Any])


def host_rates(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[int, str]:
    """`3=100mbit` as host and rate."""
    rates = {}
    for value in values:
        host, equals, rate = value.partition("=")
        if not equals or not host.isdecimal():
            raise InputError(f"host-rate must be HOST=RATE, such as 3=100mbit, got {value!r}")
        rates[int(host)] = rate
    return rates


def name_option(command: F) -> F:
    """Which laboratory, where there are several."""
    text = "Which laboratory, where there are several."
    return click.option("--name", default="lab", show_default=True, help=text)(command)


def links_options(command: F) -> F:
    """How fast links are."""
    rate = click.option(
        "--rate", default="1gbit", show_default=True, help="Of every link, both ways: 100mbit, 10gbit, unlimited, …"
    )
    others = click.option(
        "--slow-host",
        "--host-rate",
        "host_rates",
        multiple=True,
        callback=host_rates,
        metavar="HOST=RATE",
        help="A host whose link is different; may be given repeatedly.",
    )
    latency = click.option("--latency", metavar="TIME", help="Added one way between two hosts, such as 5ms.")
    return rate(others(latency(command)))


@click.group()
def lab() -> None:
    """Real slow networks on this machine: hosts as network namespaces (Linux, root)."""


@lab.command()
@click.option("--hosts", type=str, callback=count, default=4, show_default=True, help="How many.")
@links_options
@name_option
def up(hosts: int, rate: str, host_rates: dict[int, str], latency: str | None, name: str) -> None:
    """Build a network that stays until `gradsieve lab down`."""
    from gradsieve.lab.interrupts import held_back
    from gradsieve.lab.network.claim import held
    from gradsieve.lab.network.iproute import require_tools
    from gradsieve.lab.network.network import build
    from gradsieve.lab.network.topology import Topology

    topology = Topology.of(hosts, rate, host_rates, latency)
    require_tools()
    with held_back(signal.SIGINT, signal.SIGTERM), held(name):
        claim = build(name, topology, stays=True)
    click.echo(f"{topology}: {_addresses(claim.site)}")


@lab.command()
@name_option
@click.option("--all", "everything", is_flag=True, help="Every laboratory that nobody is using.")
def down(name: str, everything: bool) -> None:
    """Remove a network, or what a killed run left of it, and end what runs in its hosts."""
    from gradsieve.lab.interrupts import held_back
    from gradsieve.lab.network.claim import held, is_held, known_names, read_claim
    from gradsieve.lab.network.iproute import require_tools
    from gradsieve.lab.network.network import remove

    require_tools()
    names = [known for known in known_names() if not is_held(known)] if everything else [name]
    for known in names:
        with held_back(signal.SIGINT, signal.SIGTERM), held(known):
            claim = read_claim(known)
            if claim is not None:
                remove(claim)
        click.echo(f"{known}: removed" if claim is not None else f"{known}: nothing to remove")


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """What is up, in use, or left behind by a killed run."""
    from gradsieve.lab.network.claim import known_names, read_claim
    from gradsieve.lab.network.iproute import require_tools

    require_tools()
    claims = [claim for name in known_names() if (claim := read_claim(name)) is not None]
    known = {claim.name: _described(claim) for claim in claims}
    if as_json:
        click.echo(json.dumps({"laboratories": known}, indent=2))
        return
    if not known:
        click.echo("no laboratory is up")
    for name, described in known.items():
        click.echo(f"{name}: {described['state']}")
        for host in described["hosts"]:
            state = "up" if host["link_up"] else "DOWN"
            click.echo(f"  host {host['host']}  {host['address']}  {host['rate']}  link {state}  {host['namespace']}")


@lab.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--host", "chosen", type=int, multiple=True, help="Only in this host; may be given repeatedly.")
@click.option("--port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="MASTER_PORT.")
@click.option("--hosts", type=click.IntRange(min=1), help="Build a network of so many for this run only.")
@links_options
@name_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    chosen: Sequence[int],
    port: int,
    hosts: int | None,
    rate: str,
    host_rates: dict[int, str],
    latency: str | None,
    name: str,
    command: tuple[str, ...],
) -> int:
    """Run a command in every host, as `gradsieve lab run -- python train.py`.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set, as torch's env:// wants them. When one
    fails all are ended; its exit code is the command's.
    """
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.network.claim import held
    from gradsieve.lab.network.command import run_command
    from gradsieve.lab.network.iproute import require_tools
    from gradsieve.lab.network.network import Network, standing

    require_tools()
    with termination_unwinds(), ExitStack() as stack:
        if hosts is None:
            standing(name)
            # Several may each run in hosts of their own; all hosts at once is for one alone.
            stack.enter_context(held(name, shared=bool(chosen)))
            site = standing(name).site
        else:
            site = stack.enter_context(Network(hosts, rate, host_rates=host_rates, latency=latency, name=name)).site
        used = sorted(set(chosen)) or list(range(site.topology.hosts))
        before = {host: site.hosts[site.topology.check_host(host)].counters() for host in used}
        started = time.monotonic()
        try:
            code = run_command(site, command, used, _say, port)
        finally:
            _tell_traffic(site, before, time.monotonic() - started)
    return code


@lab.command()
@click.argument("host", type=int)
@click.argument("action", type=click.Choice(["down", "up", "rate", "drop", "vanish"]))
@click.argument("value", required=False)
@name_option
def link(host: int, action: str, value: str | None, name: str) -> None:
    """Change a host's link, also while ranks run.

    \b
    down           pull the cable
    up             plug it in
    drop SECONDS   pull it, plug it in after so long
    rate RATE      limit it anew, both ways
    vanish         pull it for good and kill what runs in the host
    """
    from gradsieve.lab.network.iproute import require_tools
    from gradsieve.lab.network.network import standing, vanish

    if (value is None) == (action in ("rate", "drop")):
        raise InputError(f"link {action} takes {'a value' if value is None else 'no value'}: gradsieve lab link --help")
    require_tools()
    site = standing(name).site
    cable = site.link(host)
    if action == "down":
        cable.down()
    elif action == "up":
        cable.up()
    elif action == "rate":
        cable.set_rate(str(value))
    elif action == "drop":
        cable.drop(_seconds(str(value)))
    else:
        vanish(site, host)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise InputError(f"seconds must be between 0 and 3600, got {value}")
    return seconds


def _addresses(site: Site) -> str:
    topology = site.topology
    return f"{topology.address(0)} to {topology.address(topology.hosts - 1)}"


def _described(claim: Claim) -> dict[str, Any]:
    from gradsieve.lab.network.claim import is_held

    if is_held(claim.name):
        state = "in use"
    elif claim.is_up:
        state = "up"
    else:
        state = f"left behind by process {claim.process}: gradsieve lab down --name {claim.name} removes it"
    numbers = range(claim.site.topology.hosts) if claim.complete else []
    return {"state": state, "hosts": [_host(claim.site, number) for number in numbers]}


def _host(site: Site, number: int) -> dict[str, Any]:
    return {
        "host": number,
        "address": site.topology.address(number),
        "rate": str(site.link(number).rate()),
        "link_up": site.link(number).is_up(),
        "namespace": site.hosts[number].namespace,
    }


def _say(host: int, line: str, is_error: bool) -> None:
    click.echo(f"[{host}] {line}", err=is_error)


def _tell_traffic(site: Site, before: dict[int, Counters], seconds: float) -> None:
    click.echo(f"{seconds:.1f} s", err=True)
    for host, then in before.items():
        moved = site.hosts[host].counters().since(then)
        click.echo(
            f"host {host}: received {moved.bytes_received:,} bytes, sent {moved.bytes_sent:,} bytes "
            f"({site.link(host).rate()})",
            err=True,
        )
