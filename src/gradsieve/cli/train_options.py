"""Options that `train`, `compare` and `bench train` share, and the training plan that they describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradsieve.cli.parsing import count_option, density_option, group_size, positive_option

if TYPE_CHECKING:
    from gradsieve.lab.train.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Fields of `workload_options`. None stands for the preset's setting, except for `data` and `group_mb`."""

    preset: str
    source: str | None
    data: str | None
    density: float | None
    dense_steps: int
    group_mb: float | None  # None exchanges the whole model as one group
    batch: int | None
    lr: float | None
    train_samples: int | None
    test_samples: int | None

    def plan(self, workload: str, recipe: str | None, values: str) -> Plan:
        """The training plan of `workload` with one recipe (None for the preset's) and one value code."""
        from gradsieve.lab.train.choice import Choice
        from gradsieve.lab.train.plan import Plan
        from gradsieve.lab.workloads import WORKLOADS

        if recipe is None:
            recipe = WORKLOADS[workload].preset(self.preset).sieve.recipe
        choice = Choice(recipe, self.density, values, self.dense_steps, self.group_mb)
        return Plan(
            workload,
            choice,
            preset=self.preset,
            source=self.source,
            data=self.data,
            batch=self.batch,
            rate=self.lr,
            train_samples=self.train_samples,
            test_samples=self.test_samples,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(WorkloadOptions):
    """Fields of `run_options`."""

    workers: int | None
    epochs: float | None
    steps: int | None
    log_every: int | None
    evaluate_every: int | None
    evaluate: str
    timeout: float | None

    def plan(self, workload: str, recipe: str | None, values: str) -> Plan:
        return replace(
            super().plan(workload, recipe, values),
            epochs=self.epochs,
            steps=self.steps,
            log_every=self.log_every,
            evaluate_every=self.evaluate_every,
            evaluate=self.evaluate,
        )


def workload_options(command: F) -> F:
    """What to train, on which data, and how much of the gradient to send."""
    return _with(
        command,
        click.option("--preset", default="default", show_default=True, metavar="NAME",
                     help="Named settings of the workload: default, paper, …"),
        click.option("--source", metavar="NAME", help="Data source, see gradsieve data list.  [default: the preset's]"),
        click.option("--data", type=click.Path(), metavar="FOLDER",
                     help="Folder with your data, for sources that need one (see gradsieve data list)."),
        density_option(help="Fraction of the entries to send.  [default: the preset's]"),
        click.option("--dense-steps", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                     help="Steps at the start that send the dense gradient."),
        click.option("--group-mb", type=str, callback=group_size, default="25", show_default=True, metavar="MB",
                     help="Maximum size of a group of parameters that is exchanged together; "
                     "none: the whole model is one group."),
        count_option("--batch", help="Samples per rank and step.  [default: the preset's]"),
        positive_option("--lr", metavar="RATE", help="Base learning rate.  [default: the preset's]"),
        count_option("--train-samples", help="Train on the first N samples only.  [default: all]"),
        count_option("--test-samples", help="Evaluate on the first N samples only.  [default: all]"),
    )  # fmt: skip


def run_options(command: F) -> F:
    """What to train, for how long, and how often to log and evaluate."""
    return _with(
        command,
        workload_options,
        count_option("--workers", help="Local rank processes to start; torchrun, Slurm and MPI set their own number.  "
                     "[default: 4]"),
        positive_option("--epochs", help="Length of the run in epochs.  [default: the preset's]"),
        count_option("--steps", help="Length of the run in steps, instead of --epochs."),
        count_option("--log-every", help="Steps between rows of training metrics.  [default: 1/100 of the run]"),
        count_option("--evaluate-every", help="Steps between evaluations.  [default: 1/15 of the run]"),
        click.option("--evaluate", type=click.Choice(["test", "validation"]), default="test", show_default=True,
                     help="Part of the data to evaluate on. Use validation for tuning; only gpt has it."),
        positive_option("--timeout", metavar="SECONDS", help="Seconds to wait for another rank.  [default: 300]"),
    )  # fmt: skip


def _with(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
