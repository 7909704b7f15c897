"""`gradsieve bench`: measurements, all printed in one form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gradsieve.cli.console import measuring
from gradsieve.cli.measures import (
    LIMITED_LINKS,
    VALUES_HELP,
    check_folder,
    density_option,
    json_option,
    network_option,
    numel_option,
    peer_options,
    raced_peers,
    ranks_option,
    repeats_option,
    several,
    show,
    threads_option,
    values_option,
    writing,
)
from gradsieve.cli.race import break_even, frontier, train
from gradsieve.cli.values import ManyValues, count, counts, density
from gradsieve.errors import InputError

SELECT_NUMELS = (1_000_000, 4_000_000, 14_700_000, 66_000_000)
REDUCE_NUMELS = (14_700_000,)
OPTIMIZER_NUMELS = (2_000_000, 25_000_000)


@click.group()
def bench() -> None:
    """Measure on this machine: selection, exchange, the wire, overlap, optimizers, training."""


@bench.command(cls=ManyValues)
@click.option("--method", "methods", multiple=True, metavar="NAME ...", help="Selectors; all if none is named.")
@numel_option(SELECT_NUMELS)
@density_option()
@threads_option()
@repeats_option(15)
@json_option()
def select(
    methods: Sequence[str],
    numels: Sequence[int],
    densities: Sequence[float],
    threads: Sequence[int],
    repeats: int,
    as_json: bool,
) -> None:
    """Time of error feedback and selection, against torch.topk and a bare add_.

    Each method keeps its residual and threshold from step to step; all take turns on the same fresh gradients.
    """
    from gradsieve.lab.bench.select import COLUMNS, SelectPlan, bench_select
    from gradsieve.selectors import SELECTORS

    plan = SelectPlan(methods or list(SELECTORS), numels, densities, threads, repeats)
    with measuring() as progress:
        report = bench_select(plan, progress)
    show(report, "Accumulate and select", COLUMNS, as_json)


@bench.command(cls=ManyValues)
@click.option("--recipe", "recipes", multiple=True, metavar="NAME ...", help="Recipes; all if none is named.")
@network_option(LIMITED_LINKS)
@peer_options
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the times to this PNG file.")
@values_option()
@ranks_option((4,))
@numel_option(REDUCE_NUMELS)
@density_option()
@repeats_option(15)
@json_option()
def reduce(
    recipes: Sequence[str],
    networks: Sequence[str],
    peers: Sequence[str],
    no_peers: bool,
    plot: Path | None,
    values: Sequence[str],
    ranks: Sequence[int],
    numels: Sequence[int],
    densities: Sequence[float],
    repeats: int,
    as_json: bool,
) -> None:
    """Time of whole steps on local processes (Gloo), against the backend's all_reduce and DDP's hooks.

    Over loopback, or with --network in hosts of their own on limited links, one network after the other.
    """
    check_folder(plot)
    from gradsieve.lab.bench.reduce import COLUMNS, ReducePlan, bench_reduce
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.plots.steps import draw_steps
    from gradsieve.recipes import RECIPES

    raced = raced_peers(peers, no_peers, networks)
    plan = ReducePlan(
        recipes or list(RECIPES), numels, densities, ranks, repeats, networks or (LOOPBACK,), raced, values
    )
    with termination_unwinds(), measuring() as progress:
        report = bench_reduce(plan, progress)
    show(report, "From gradient to written-back mean", COLUMNS, as_json)
    if plot is not None:
        with writing(plot):
            draw_steps(plot, report.results)


@bench.command(cls=ManyValues)
@click.option("--values", multiple=True, metavar="CODE ...", help="How values are written; all codes if none is named.")
@click.option(
    "--indices",
    multiple=True,
    default=("auto",),
    show_default=True,
    metavar="CODE ...",
    help="How indices are written: auto, plain, bitmap, blocks, gaps.",
)
@network_option(
    "Count by the interfaces of a limited network too: 1gbit, … (Linux, root).  [default: ranks as threads]"
)
@ranks_option((4, 8))
@click.option(
    "--numel", type=str, callback=count, default=14_700_000, show_default=True, metavar="N", help="Gradient length."
)
@density_option()
@repeats_option(20)
@json_option()
def wire(
    values: Sequence[str],
    indices: Sequence[str],
    networks: Sequence[str],
    ranks: Sequence[int],
    numel: int,
    densities: Sequence[float],
    repeats: int,
    as_json: bool,
) -> None:
    """Bytes that Ok-Topk receives in every code, against the papers' lower bound; those of updates; speed of codes.

    The lower bound is 2k(P-1)/P words: an index and a value of four bytes for each of k entries.
    """
    from gradsieve.lab.bench.wire import COLUMNS, THREADS, WirePlan, bench_wire
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.wire import Codec
    from gradsieve.wire.values import VALUE_CODES

    for name in (*values, *indices):
        Codec(values=name) if name in values else Codec(indices=name)
    plan = WirePlan(values or list(VALUE_CODES), indices, densities, ranks, numel, repeats, networks or (THREADS,))
    with termination_unwinds(), measuring() as progress:
        report = bench_wire(plan, progress)
    show(report, "On the wire", COLUMNS, as_json)


@bench.command(cls=ManyValues)
@click.option("--recipe", default="oktopk", show_default=True, metavar="NAME", help="Recipe.")
@click.option("--values", default="own", show_default=True, metavar="CODE", help=VALUES_HELP)
@click.option("--density", type=str, callback=density, default=0.01, show_default=True, metavar="D", help="Share sent.")
@click.option(
    "--group-mb",
    "group_mbs",
    multiple=True,
    type=float,
    default=(1.0, 5.0, 25.0),
    show_default=True,
    metavar="MB ...",
    help="Sizes of groups, besides one for all.",
)
@network_option(LIMITED_LINKS)
@click.option("--ranks", "--hosts", "ranks", type=int, default=2, show_default=True, metavar="P", help="Workers.")
@click.option("--width", type=int, default=64, show_default=True, metavar="W", help="Of the VGG-16; 64 is the paper's.")
@click.option("--batch", type=int, default=2, show_default=True, metavar="B", help="Images a worker and step.")
@repeats_option(7)
@json_option()
def overlap(
    recipe: str,
    values: str,
    density: float,
    group_mbs: Sequence[float],
    networks: Sequence[str],
    ranks: int,
    width: int,
    batch: int,
    repeats: int,
    as_json: bool,
) -> None:
    """How much of the exchange backward hides, by size of groups; and what the hook costs with nothing sent."""
    from gradsieve.lab.bench.overlap import COLUMNS, OverlapPlan, bench_overlap
    from gradsieve.lab.bench.site import LOOPBACK
    from gradsieve.lab.interrupts import termination_unwinds

    plan = OverlapPlan(recipe, values, density, group_mbs, networks or (LOOPBACK,), ranks, width, batch, repeats)
    with termination_unwinds(), measuring() as progress:
        report = bench_overlap(plan, progress)
    show(report, "Exchange beside backward", COLUMNS, as_json)


@bench.command(cls=ManyValues)
@numel_option(OPTIMIZER_NUMELS)
@several("--tensors", callback=counts, default=(4, 100), metavar="N ...", help="Tensors that the parameters are in.")
@click.option("--ranks", type=str, callback=count, default=4, show_default=True, metavar="P", help="Ranks to step for.")
@threads_option()
@repeats_option(40)
@json_option()
def optimizer(
    numels: Sequence[int],
    tensors: Sequence[int],
    ranks: int,
    threads: Sequence[int],
    repeats: int,
    as_json: bool,
) -> None:
    """Time of a step of gradsieve.AdamW, against torch's fused AdamW, in turns."""
    from gradsieve.lab.bench.optimizer import COLUMNS, OptimizerPlan, bench_optimizer

    if max(tensors) > min(numels):
        raise InputError(f"{min(numels):,} entries do not fill {max(tensors):,} tensors: use fewer --tensors")
    with measuring() as progress:
        report = bench_optimizer(OptimizerPlan(numels, tensors, ranks, threads, repeats), progress)
    show(report, "A step of AdamW", COLUMNS, as_json)


bench.add_command(train)
bench.add_command(break_even)
bench.add_command(frontier)
