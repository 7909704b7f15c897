"""`gradsieve train`: one run of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradsieve.cli.training import last_words, plan_of, run_folder, run_options
from gradsieve.cli.values import count
from gradsieve.errors import GradsieveError, InputError, MismatchError

if TYPE_CHECKING:
    from gradsieve.lab.train.plan import Plan

MAY_CHANGE = ("epochs", "steps", "log_every", "evaluate_every", "checkpoint_every", "probe_every")
"""Settings that make sense to give anew with --resume."""

AROUND = ("workers", "timeout", "as_json", "resume", "out", "tensorboard", "device")
"""Options that say nothing about what is trained."""


@click.command()
@click.argument("workload", required=False)
@click.option(
    "--recipe", help="How gradients are exchanged (gradsieve list); dense is plain DDP.  [default: the preset's]"
)
@click.option(
    "--values",
    default="own",
    show_default=True,
    help="How values are written: exact, bf16, int8, …; own: the recipe's own code.",
)
@run_options
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of model, order and chance.")
@click.option("--checkpoint-every", type=str, callback=count, help="Steps between checkpoints.  [default: none]")
@click.option(
    "--resume", type=click.Path(path_type=Path), help="Folder of a run to go on with, from its last checkpoint."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results.  [default: runs/<name>-<time>]")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard's files too.")
@click.option(
    "--probe",
    is_flag=False,
    flag_value="50",
    type=str,
    callback=count,
    metavar="[STEPS]",
    help="Every so many steps (50 if not said) measure what the papers draw, into probe.jsonl.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.pass_context
def train(context: click.Context, /, **options: Any) -> None:  # fmt: skip
    """Train WORKLOAD data-parallel: vgg16, resnet20, resnet50, alexnet, lstm, deepspeech, bert, gpt.

    Starts local workers, or joins the world it finds under torchrun, Slurm (srun) or MPI (mpiexec).
    """
    options["probe_every"] = options.pop("probe")
    around = {name: options.pop(name) for name in AROUND}
    resume: Path | None = around["resume"]
    if resume is None and options["workload"] is None:
        raise InputError("name a workload, such as gradsieve train resnet20, or give --resume DIR")
    from gradsieve.cli.progress import watching
    from gradsieve.lab.interrupts import termination_unwinds
    from gradsieve.lab.train.launch import launch
    from gradsieve.lab.train.run import train_everywhere

    plan, workers = (plan_of(options), around["workers"]) if resume is None else _resumed(context, options, resume)
    folder = resume or run_folder(around["out"], f"{plan.workload}-{plan.choice.recipe}")
    with termination_unwinds(), last_words(folder), watching(folder, around["as_json"], around["tensorboard"]) as see:
        result = launch(
            around["workers"] or workers, around["device"], folder, train_everywhere, plan, resume is not None,
            on_report=see, timeout=around["timeout"],
        )  # fmt: skip
    if not result["replicas_equal"]:
        raise MismatchError("workers ended with different parameters")
    if result["diverged"]:
        raise GradsieveError(f"the loss was no longer finite at step {result['steps']}: lower the rate, or send more")


def _resumed(context: click.Context, options: dict[str, Any], folder: Path) -> tuple[Plan, int]:
    """The plan it was started with; what would make it another run is refused."""
    from gradsieve.lab.train.journal import read_config
    from gradsieve.lab.train.plan import Plan

    config = read_config(folder)
    plan = {**config["plan"]}
    for name, value in options.items():
        option = "probe" if name == "probe_every" else name
        if context.get_parameter_source(option) in (None, click.core.ParameterSource.DEFAULT):
            continue
        known = plan["exchange"].get(name, plan.get(name))
        if name not in MAY_CHANGE and value != known:
            raise InputError(
                f"{name.replace('_', '-')} cannot change in a resumed run: it was {known}, got {value}; leave it out"
            )
        if name in MAY_CHANGE:
            plan[name] = value
            if name in ("epochs", "steps"):
                plan["epochs" if name == "steps" else "steps"] = None
    return Plan.from_json(plan), config["workers"]
