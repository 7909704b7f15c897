"""`gradsieve bench select` and `bench optimizer`: what one rank computes, without any exchange."""

from __future__ import annotations

from dataclasses import dataclass

import click

from gradsieve.cli.bench_options import (
    densities_option,
    json_option,
    numel_option,
    repeats_option,
    several,
    threads_option,
)
from gradsieve.cli.bench_output import show
from gradsieve.cli.console import measuring
from gradsieve.cli.parsing import ManyValues, count_option, counts, parsed_into
from gradsieve.errors import InputError

SELECT_NUMELS = (1_000_000, 4_000_000, 14_700_000, 66_000_000)
OPTIMIZER_NUMELS = (2_000_000, 25_000_000)


@dataclass(frozen=True)
class SelectOptions:
    """Parsed options of `gradsieve bench select`."""

    methods: tuple[str, ...]  # empty for all
    numels: tuple[int, ...]
    densities: tuple[float, ...]
    threads: tuple[int, ...]
    repeats: int
    as_json: bool


@click.command(cls=ManyValues)
@click.option("--method", "methods", multiple=True, metavar="NAME ...", help="Selectors.  [default: all]")
@numel_option(SELECT_NUMELS)
@densities_option()
@threads_option()
@repeats_option(15)
@json_option()
@parsed_into(SelectOptions)
def select(options: SelectOptions) -> None:
    """Time error feedback and selection against torch.topk.

    A plain add_ is measured too, for scale. Each method keeps its residual and threshold from step to step. All
    methods take turns on the same new gradients.
    """
    from gradsieve.lab.bench.select import COLUMNS, SelectPlan, bench_select
    from gradsieve.selectors import SELECTORS

    plan = SelectPlan(
        methods=options.methods or list(SELECTORS),
        numels=options.numels,
        densities=options.densities,
        threads=options.threads,
        repeats=options.repeats,
    )
    with measuring() as progress:
        report = bench_select(plan, progress)
    show(report, "Accumulate and select", COLUMNS, options.as_json)


@dataclass(frozen=True)
class OptimizerOptions:
    """Parsed options of `gradsieve bench optimizer`."""

    numels: tuple[int, ...]
    tensors: tuple[int, ...]
    ranks: int
    threads: tuple[int, ...]
    repeats: int
    as_json: bool


@click.command(cls=ManyValues)
@numel_option(OPTIMIZER_NUMELS)
@several(
    "--tensors", callback=counts, default=(4, 100), metavar="N ...", help="Number of tensors that hold the parameters."
)
@count_option("--ranks", default=4, metavar="P", help="Number of ranks that the optimizer is configured for; one runs.")
@threads_option()
@repeats_option(40)
@json_option()
@parsed_into(OptimizerOptions)
def optimizer(options: OptimizerOptions) -> None:
    """Time gradsieve.AdamW against torch's fused AdamW.

    The two optimizers take turns on the same gradients.
    """
    from gradsieve.lab.bench.optimizer import COLUMNS, OptimizerPlan, bench_optimizer

    numels, tensors = options.numels, options.tensors
    if max(tensors) > min(numels):
        raise InputError(f"{min(numels):,} entries do not fill {max(tensors):,} tensors: use fewer --tensors")
    plan = OptimizerPlan(numels, tensors, options.ranks, options.threads, options.repeats)
    with measuring() as progress:
        report = bench_optimizer(plan, progress)
    show(report, "One step of AdamW", COLUMNS, options.as_json)
