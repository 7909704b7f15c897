"""`gradsieve bench reduce`, `bench wire` and `bench overlap`: the exchange between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gradsieve.cli.bench_options import (
    DENSITY_HELP,
    RANKS_HELP,
    VALUES_HELP,
    baseline_options,
    chosen_baselines,
    densities_option,
    json_option,
    network_option,
    numel_option,
    ranks_option,
    repeats_option,
    values_option,
)
from gradsieve.cli.bench_output import check_folder, show, writing
from gradsieve.cli.console import measuring
from gradsieve.cli.lab_space import enter_space_for
from gradsieve.cli.parsing import ManyValues, count_option, density_option, parsed_into

NUMEL = 14_700_000  # parameters of the papers' VGG-16


@dataclass(frozen=True)
class ReduceOptions:
    """Parsed options of `gradsieve bench reduce`."""

    recipes: tuple[str, ...]  # empty for all
    networks: tuple[str, ...]  # empty for loopback
    baselines: tuple[str, ...]
    no_baselines: bool
    plot: Path | None
    values: tuple[str, ...]
    ranks: tuple[int, ...]
    numels: tuple[int, ...]
    densities: tuple[float, ...]
    repeats: int
    as_json: bool


@click.command(cls=ManyValues)
@click.option("--recipe", "recipes", multiple=True, metavar="NAME ...", help="Recipes.  [default: all]")
@network_option()
@baseline_options
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot the times to this PNG file.")
@values_option()
@ranks_option((4,))
@numel_option((NUMEL,))
@densities_option()
@repeats_option(15)
@json_option()
@parsed_into(ReduceOptions)
def reduce(options: ReduceOptions) -> None:
    """Time the exchange against all_reduce and torch's DDP hooks.

    A step goes from local gradient to averaged gradient. Ranks are local processes that communicate by Gloo over
    loopback. With --network each rank runs in a host of its own on limited links. Several networks are measured one
    after the other.

    \b
    Example:
      gradsieve bench reduce --recipe dense oktopk --network 100mbit 1gbit --ranks 4
    """
    check_folder(options.plot)
    enter_space_for(options.networks)
    from gradsieve.lab.bench.reduce import COLUMNS, ReducePlan, bench_reduce
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.plots.steps import draw_steps
    from gradsieve.recipes import RECIPES

    plan = ReducePlan(
        options.recipes or list(RECIPES),
        options.numels,
        options.densities,
        options.ranks,
        options.repeats,
        options.networks or (LOOPBACK,),
        chosen_baselines(options.baselines, options.no_baselines, options.networks),
        options.values,
    )
    with termination_unwinds(), measuring() as progress:
        report = bench_reduce(plan, progress)
    show(report, "From local gradient to averaged gradient", COLUMNS, options.as_json)
    if options.plot is not None:
        with writing(options.plot):
            draw_steps(options.plot, report.results)


@dataclass(frozen=True)
class WireOptions:
    """Parsed options of `gradsieve bench wire`."""

    values: tuple[str, ...]  # empty for all
    indices: tuple[str, ...]
    networks: tuple[str, ...]  # empty for ranks as threads
    ranks: tuple[int, ...]
    numel: int
    densities: tuple[float, ...]
    repeats: int
    as_json: bool


@click.command(cls=ManyValues)
@click.option("--values", multiple=True, metavar="CODE ...", help="Value codes.  [default: all]")
@click.option(
    "--indices",
    multiple=True,
    default=("auto",),
    show_default=True,
    metavar="CODE ...",
    help="Index codes: auto, plain, bitmap, blocks, gaps.",
)
@network_option(
    "Also count the bytes at the network interfaces, on links of this rate: 1gbit, … (Linux).  "
    "[default: ranks are threads]"
)
@ranks_option((4, 8))
@count_option("--numel", default=NUMEL, help="Length of the gradient in entries.")
@densities_option()
@repeats_option(20)
@json_option()
@parsed_into(WireOptions)
def wire(options: WireOptions) -> None:
    """Count Ok-Topk's bytes per rank and step with every code.

    They are compared with the papers' lower bound, 2k(P-1)/P words: an index and a value of four bytes each for k
    entries. Further rows count the bytes of exchanged updates and the bytes of indices against their entropy, and
    measure the speed of encoding and decoding.
    """
    enter_space_for(options.networks)
    from gradsieve.lab.bench.wire import COLUMNS, THREADS, WirePlan, bench_wire
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.wire import Codec
    from gradsieve.wire.values import VALUE_CODES

    for name in options.values:
        Codec(values=name)  # raises for an unknown name
    for name in options.indices:
        Codec(indices=name)
    plan = WirePlan(
        values=options.values or list(VALUE_CODES),
        indices=options.indices,
        densities=options.densities,
        ranks=options.ranks,
        numel=options.numel,
        repeats=options.repeats,
        networks=options.networks or (THREADS,),
    )
    with termination_unwinds(), measuring() as progress:
        report = bench_wire(plan, progress)
    show(report, "On the wire", COLUMNS, options.as_json)


@dataclass(frozen=True)
class OverlapOptions:
    """Parsed options of `gradsieve bench overlap`."""

    recipe: str
    values: str
    density: float
    group_mbs: tuple[float, ...]
    networks: tuple[str, ...]  # empty for loopback
    ranks: int
    width: int
    batch: int
    repeats: int
    as_json: bool


@click.command(cls=ManyValues)
@click.option(
    "--recipe", default="oktopk", show_default=True, metavar="NAME", help="Recipe to measure, see gradsieve list."
)
@click.option("--values", default="own", show_default=True, metavar="CODE", help=VALUES_HELP)
@density_option(default=0.01, help=DENSITY_HELP)
@click.option(
    "--group-mb",
    "group_mbs",
    multiple=True,
    type=float,
    default=(1.0, 5.0, 25.0),
    show_default=True,
    metavar="MB ...",
    help="Maximum group sizes in MB to measure, in addition to one group for the whole model.",
)
@network_option()
@click.option("--ranks", "--hosts", "ranks", type=int, default=2, show_default=True, metavar="P", help=RANKS_HELP)
@click.option(
    "--width",
    type=int,
    default=64,
    show_default=True,
    metavar="W",
    help="Channels of the VGG-16's first layer; the paper has 64.",
)
@click.option("--batch", type=int, default=2, show_default=True, metavar="B", help="Images per rank and step.")
@repeats_option(7)
@json_option()
@parsed_into(OverlapOptions)
def overlap(options: OverlapOptions) -> None:
    """Measure how much of the exchange overlaps with backward.

    There is one row per group size. The row `nothing sent` shows the cost of the hook itself.
    """
    enter_space_for(options.networks)
    from gradsieve.lab.bench.overlap import COLUMNS, OverlapPlan, bench_overlap
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.interrupts import termination_unwinds

    plan = OverlapPlan(
        recipe=options.recipe,
        values=options.values,
        density=options.density,
        group_mbs=options.group_mbs,
        networks=options.networks or (LOOPBACK,),
        ranks=options.ranks,
        width=options.width,
        batch=options.batch,
        repeats=options.repeats,
    )
    with termination_unwinds(), measuring() as progress:
        report = bench_overlap(plan, progress)
    show(report, "Overlap of exchange and backward", COLUMNS, options.as_json)
