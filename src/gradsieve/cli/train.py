"""`gradsieve train`: one run of a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradsieve.cli.parsing import count, count_option, folder_option, given_options, parsed_into, seed_option
from gradsieve.cli.run_folder import create_run_folder, log_shown_on_failure
from gradsieve.cli.train_options import RunOptions, run_options
from gradsieve.errors import GradsieveError, InputError, MismatchError

if TYPE_CHECKING:
    from gradsieve.lab.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Parsed options of `gradsieve train`. None means that the option was not given."""

    workload: str | None
    recipe: str | None
    values: str
    seed: int
    checkpoint_every: int | None
    resume: Path | None
    out: Path | None
    tensorboard: bool
    probe: int | None  # steps between probes
    device: str
    as_json: bool


@dataclass(frozen=True)
class Run:
    """What to run, on how many ranks (None for the default), and where its files are."""

    plan: Plan
    workers: int | None
    folder: Path
    resumes: bool


@click.command()
@click.argument("workload", required=False)
@click.option(
    "--recipe",
    metavar="NAME",
    help="How gradients are exchanged, see gradsieve list; dense is plain DDP.  [default: the preset's]",
)
@click.option(
    "--values",
    default="own",
    show_default=True,
    metavar="CODE",
    help="Value code, which encodes the values that are sent: exact, bf16, int8, …; own: the recipe's own code.",
)
@run_options
@seed_option("--seed", help="Seed for initialization, data order and dropout.")
@count_option("--checkpoint-every", help="Steps between checkpoints.  [default: none]")
@folder_option("--resume", help="Folder of a run to resume from its last checkpoint.")
@folder_option("--out", help="Folder for results.  [default: runs/<workload>-<recipe>-<time>]")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard files.")
@click.option(
    "--probe",
    is_flag=False,
    flag_value="50",
    type=str,
    callback=count,
    metavar="[STEPS]",
    help="Every STEPS steps (50 if left out), write the quantities that the papers plot to probe.jsonl.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device to train on; cuda needs a launcher such as torchrun.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines, as is the default if stdout is not a terminal."
)
@parsed_into(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train WORKLOAD data-parallel.

    WORKLOAD is vgg16, resnet20, resnet50, alexnet, lstm, deepspeech, bert or gpt. The command starts local rank
    processes. Under torchrun, Slurm (srun) or MPI (mpiexec) it is one rank of their job instead.

    \b
    Example:
      gradsieve train resnet20 --recipe oktopk --density 0.01 --workers 4
    """
    from gradsieve.cli.train_progress import watching
    from gradsieve.lab.interrupts import termination_unwinds

    run = _run(options)
    from gradsieve.lab.train.launch import launch
    from gradsieve.lab.train.run import train_everywhere

    with (
        termination_unwinds(),
        log_shown_on_failure(run.folder),
        watching(run.folder, options.as_json, options.tensorboard) as see,
    ):
        result = launch(
            run.workers, options.device, run.folder, train_everywhere, run.plan, run.resumes,
            on_report=see, timeout=options.timeout,
        )  # fmt: skip
    if not result["replicas_equal"]:
        raise MismatchError("the ranks ended with different parameters")
    if result["diverged"]:
        raise GradsieveError(f"the loss is not finite at step {result['steps']}: lower --lr, or raise --density")


def _run(options: TrainOptions) -> Run:
    if options.resume is not None:
        return _resumed_run(options, options.resume)
    if options.workload is None:
        raise InputError("name a workload, such as gradsieve train resnet20, or give --resume DIR")
    return _new_run(options, options.workload)


def _new_run(options: TrainOptions, workload: str) -> Run:
    plan = replace(
        options.plan(workload, options.recipe, options.values),
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
        probe_every=options.probe,
    )
    folder = create_run_folder(options.out, f"{workload}-{plan.choice.recipe}")
    return Run(plan, options.workers, folder, resumes=False)


def _resumed_run(options: TrainOptions, folder: Path) -> Run:
    """The saved run. Its length and its intervals may change; any other change is refused."""
    from gradsieve.lab.train.journal import read_config
    from gradsieve.lab.train.plan import Plan

    config = read_config(folder)
    saved = Plan.from_json(config["plan"])
    _refuse_other_settings(options, saved)
    plan = replace(
        saved,
        log_every=options.log_every or saved.log_every,
        evaluate_every=options.evaluate_every or saved.evaluate_every,
        checkpoint_every=options.checkpoint_every or saved.checkpoint_every,
        probe_every=options.probe or saved.probe_every,
    )
    if options.steps is not None:
        plan = replace(plan, steps=options.steps, epochs=None)
    elif options.epochs is not None:
        plan = replace(plan, steps=None, epochs=options.epochs)
    return Run(plan, options.workers or config["workers"], folder, resumes=True)


def _refuse_other_settings(options: TrainOptions, saved: Plan) -> None:
    fixed: dict[str, object] = {
        "workload": saved.workload,
        "recipe": saved.choice.recipe,
        "values": saved.choice.values,
        "density": saved.choice.density,
        "dense_steps": saved.choice.dense_steps,
        "group_mb": saved.choice.group_mb,
        "preset": saved.preset,
        "source": saved.source,
        "data": saved.data,
        "batch": saved.batch,
        "lr": saved.rate,
        "train_samples": saved.train_samples,
        "test_samples": saved.test_samples,
        "evaluate": saved.evaluate,
        "seed": saved.seed,
    }
    for field, option in given_options().items():
        if field in fixed and getattr(options, field) != fixed[field]:
            raise InputError(
                f"{option} cannot change in a resumed run: it was {fixed[field]}, got {getattr(options, field)}; "
                "leave it out"
            )
