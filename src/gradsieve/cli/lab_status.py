"""`gradsieve lab status`: the laboratories on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.parsing import parsed_into

if TYPE_CHECKING:
    from gradsieve.lab.network.claim import Claim
    from gradsieve.lab.network.switch import Site


@dataclass(frozen=True)
class LabStatusOptions:
    """Parsed options of `gradsieve lab status`."""

    as_json: bool


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@parsed_into(LabStatusOptions)
def status(options: LabStatusOptions) -> None:
    """Show which laboratories are up, in use or left behind.

    A killed run leaves its laboratory behind. `gradsieve lab down` removes it.
    """
    from gradsieve.lab.network.claim import known_names, read_claim
    from gradsieve.lab.network.iproute import require_tools

    require_tools()
    claims = [claim for name in known_names() if (claim := read_claim(name)) is not None]
    described = {claim.name: _described(claim) for claim in claims}
    if options.as_json:
        click.echo(json.dumps({"laboratories": described}, indent=2))
        return
    if not described:
        click.echo("no laboratory is up")
    for name, laboratory in described.items():
        click.echo(f"{name}: {laboratory['state']}")
        for host in laboratory["hosts"]:
            state = "up" if host["link_up"] else "DOWN"
            click.echo(f"  host {host['host']}  {host['address']}  {host['rate']}  link {state}  {host['namespace']}")


def _described(claim: Claim) -> dict[str, Any]:
    from gradsieve.lab.network.claim import is_held
    from gradsieve.lab.network.remains import beside

    if is_held(claim.name):
        state = "in use"
    elif claim.is_up:
        state = "up"
    else:
        state = f"left behind by process {claim.process}: gradsieve lab down --name {claim.name} removes it"
    shown = claim.complete and claim.is_reachable and not claim.is_elsewhere
    return {"state": state, "hosts": beside(claim, partial(_hosts, claim.site)) if shown else []}


def _hosts(site: Site) -> list[dict[str, Any]]:
    return [_host(site, number) for number in range(site.topology.hosts)]


def _host(site: Site, number: int) -> dict[str, Any]:
    return {
        "host": number,
        "address": site.topology.address(number),
        "rate": str(site.link(number).rate()),
        "link_up": site.link(number).is_up(),
        "namespace": site.hosts[number].namespace,
    }
