"""`gradsieve demo`: dense DDP, torch's bf16 hook and Gradsieve on slow links, side by side, in about two minutes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.console import stderr, stdout
from gradsieve.cli.lab_space import enter_space
from gradsieve.cli.parsing import count_option, folder_option, parsed_into, seed_option
from gradsieve.cli.run_folder import create_run_folder, log_shown_on_failure
from gradsieve.errors import MismatchError

if TYPE_CHECKING:
    from gradsieve.lab.bench.demo import Demo


@dataclass(frozen=True)
class DemoOptions:
    """Parsed options of `gradsieve demo`."""

    hosts: int
    steps: int
    seed: int
    rate: str
    loopback: bool
    out: Path | None
    as_json: bool


@click.command()
@count_option("--hosts", "--workers", "hosts", default=4, metavar="P", help="Hosts, with one rank each, at least 2.")
@count_option("--steps", default=32, help="Training steps of each contestant.")
@seed_option("--seed", help="Seed for initialization and data order.")
@click.option("--rate", default="100mbit", show_default=True, metavar="RATE", help="Rate of every host's link.")
@click.option("--loopback", is_flag=True, help="Build no network: compute the time on the links, do not measure it.")
@folder_option("--out", help="Folder for results.  [default: runs/demo-<time>]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@parsed_into(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Train on slow links: dense DDP, bf16 and Gradsieve side by side.

    A perceptron of 1.7 million parameters learns scikit-learn's handwritten digits on four hosts: network namespaces on
    this machine, with links of 100 Mbit/s. Dense DDP, torch's bf16 hook, Ok-Topk and one-bit updates start from the
    same model and take the same batches and steps. The contestant with the least time on its own clock trains next, so
    the fastest finishes first.

    Where no network can be built, the ranks run over loopback, and the time on the links is computed.
    """
    from gradsieve.lab.interrupts import termination_unwinds

    with termination_unwinds():
        planned = _planned(options)  # before torch is imported: its threads keep a process from entering a space
        from gradsieve.cli.demo_output import next_steps, summary, table
        from gradsieve.cli.demo_progress import watching
        from gradsieve.lab.bench.demo import run_demo

        folder = create_run_folder(options.out, "demo")
        if planned.obstacle and not options.as_json:
            stderr().print(f"No network: {planned.obstacle}. Training over loopback instead.", soft_wrap=True)
        with log_shown_on_failure(folder), watching(planned, options.as_json) as see:
            content = run_demo(planned, folder, see)
    if options.as_json:
        click.echo(json.dumps(content))
    else:
        console = stdout()
        console.print(table(content))
        for paragraph in (summary(content), f"Picture: {content['picture']}", next_steps()):
            console.print(paragraph, soft_wrap=True, markup=False)
            console.print()
    unequal = [row["name"] for row in content["results"] if not row["replicas_equal"]]
    if unequal:
        raise MismatchError(f"the ranks ended with different parameters: {', '.join(unequal)}")


def _planned(options: DemoOptions) -> Demo:
    """Check the options, and whether a network can be built here."""
    from dataclasses import replace

    from gradsieve.lab.network.topology import Topology

    Topology.of(options.hosts, options.rate)
    refused = "--loopback was given" if options.loopback else _refused()
    from gradsieve.lab.bench.demo import Demo
    from gradsieve.lab.bench.site import obstacle

    planned = Demo(options.hosts, options.steps, options.seed, options.rate)
    return replace(planned, obstacle=refused or obstacle())


def _refused() -> str | None:
    """Move to where networks can be built, before torch is imported. Returns why that is not possible."""
    from gradsieve.lab.network.errors import NetworkError

    try:
        enter_space()
    except NetworkError as error:
        return str(error)
    return None
