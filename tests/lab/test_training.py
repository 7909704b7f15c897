"""The trainer: real workers, real data (digits), few steps."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve import SPARSELOCO, Outer
from gradsieve.cli import main
from gradsieve.errors import InputError, UnknownNameError
from gradsieve.feedback import MomentumResidual, NoFeedback, Residual
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from gradsieve.lab.train import checkpoint
from gradsieve.lab.train.choice import Choice, parse_choices
from gradsieve.lab.train.journal import read_rows
from gradsieve.lab.train.plan import Pace, Plan
from gradsieve.lab.train.replica import Replica
from gradsieve.lab.train.world import found_world
from gradsieve.lab.workloads import WORKLOADS
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.workload import Limits, Preset

SMALL = [
    "resnet20",
    "--workers",
    "2",
    "--batch",
    "4",
    "--train-samples",
    "64",
    "--test-samples",
    "40",
    "--log-every",
    "2",
]


def run(*arguments: str) -> None:
    assert main(["train", *arguments, "--json"]) == 0


def result(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return read


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = [
        *SMALL,
        "--recipe",
        "oktopk",
        "--values",
        "bf16",
        "--steps",
        "8",
        "--checkpoint-every",
        "3",
        "--probe",
        "2",
    ]
    run(*options, "--out", str(whole))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in (lines[0], lines[-1])] == ["start", "end"]
    shutil.copytree(whole, cut)
    for later in checkpoint.finished(cut)[1:]:  # as if it had been killed after the first one
        later.rename(tmp_path / later.name)
    (cut / "result.json").unlink()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tr')  # and in the middle of a line
    run("--resume", str(cut))
    assert checkpoint.finished(cut)[-1].name == "step-00000008"
    assert result(cut)["digest"] == result(whole)["digest"]
    assert result(cut)["scores"] == result(whole)["scores"]
    for name in ("metrics.jsonl", "probe.jsonl"):
        rows = read_rows(whole / name)
        assert rows
        assert without_times(read_rows(cut / name)) == without_times(rows)
    probe = read_rows(whole / "probe.jsonl")[-1]
    assert [row["step"] for row in read_rows(whole / "probe.jsonl")] == [2, 4, 6, 8]
    assert probe["contraction_exact"] <= probe["contraction"] <= 1
    assert probe["contraction_exact"] <= probe["bound"]
    assert sum(probe["histogram"]["counts"]) <= probe["numel"]
    config = json.loads((whole / "config.json").read_text())
    assert config["workers"] == 2
    assert "bf16" in config["recipe"]
    assert json.loads((whole / "environment.json").read_text())["cores"] >= 1
    capsys.readouterr()
    assert main(["train", "--resume", str(cut), "--recipe", "topka"]) == 2
    assert "recipe cannot change in a resumed run: it was oktopk, got topka" in capsys.readouterr().err
    assert main(["train", "--resume", str(cut), "--workers", "3"]) == 2
    assert "was saved by 2 ranks, this run has 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--lr 0.2", "lr cannot change in a resumed run: it was 0.1, got 0.2; leave it out"),
        ("--lr 0.1 --group-mb 5", "group-mb cannot change in a resumed run: it was None, got 5.0; leave it out"),
        ("--lr 0.1 --group-mb none --density 0.1", "density cannot change in a resumed run: it was 0.01, got 0.1"),
        ("vgg16 --lr 0.1", "workload cannot change in a resumed run: it was resnet20, got vgg16"),
        ("--evaluate validation", "evaluate cannot change in a resumed run: it was test, got validation"),
    ],
)
def test_a_resumed_run_refuses_other_settings_and_accepts_its_own(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan("resnet20", Choice("oktopk", 0.01, group_mb=None), steps=4, rate=0.1)
    (tmp_path / "config.json").write_text(json.dumps({"plan": plan.to_json(), "workers": 2}))
    assert main(["train", "--resume", str(tmp_path), *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_a_resumed_exchange_of_updates_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Every rank goes on from its own optimizer's state, and from an exchange that was still to come."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(*SMALL, "--recipe", "onebit-updates", "--steps", "7", "--checkpoint-every", "3", "--out", str(whole))
    shutil.copytree(whole, cut)
    for later in checkpoint.finished(cut)[1:]:
        later.rename(tmp_path / later.name)
    (cut / "result.json").unlink()
    run("--resume", str(cut))
    assert result(cut)["digest"] == result(whole)["digest"]
    assert result(cut)["scores"] == result(whole)["scores"]


def full_disk(process: RankProcess, folder: Path) -> str:
    """A limit on the size of files is a disk that is full, without root."""
    state = {"values": torch.zeros(50_000)}
    checkpoint.save(folder, 1, state if process.rank == 0 else None, {"rank": process.rank})
    if process.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(folder, 2, state if process.rank == 0 else None, {"rank": process.rank})
    except checkpoint.CheckpointError as error:
        return str(error)
    return "saved"


def test_a_full_disk_leaves_the_checkpoint_before_intact(tmp_path: Path) -> None:
    for said in run_rank_processes(2, full_disk, tmp_path):
        assert "rank 0: cannot write the checkpoint" in said
        assert "step-00000001, is intact" in said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    saved = checkpoint.load_latest(tmp_path, rank=1, size=2)
    assert saved.own == {"rank": 1}
    assert torch.equal(saved.shared["values"], torch.zeros(50_000))


def test_torchrun_is_joined(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    train = [
        sys.executable,
        "-m",
        "gradsieve.cli",
        "train",
        *SMALL[:1],
        *SMALL[3:],
        "--recipe",
        "dense",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [*command, *train, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines].count("end") == 1
    assert lines[0]["workers"] == 2
    assert result(tmp_path)["replicas_equal"] is True


DYING = """
import os, sys
import gradsieve.lab.train.replica as replica
step = replica.Replica._step
def die(self, interval):
    if self.rank == 1 and self.step == 1:
        print("this is what it said", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    step(self, interval)
replica.Replica._step = die
"""


def test_a_worker_that_dies_is_named_with_its_last_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert main(["train", *SMALL, "--steps", "4", "--out", str(tmp_path / "run"), "--json"]) == 2
    said = capfd.readouterr().err
    assert "Last lines of rank 1" in said
    assert "this is what it said" in said
    assert "rank 1 ended without an error message, by signal SIGKILL" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a workload"),
        (["resnet21"], "unknown workload 'resnet21'; did you mean 'resnet20'?"),
        (["resnet20", "--recipe", "oktop"], "unknown recipe 'oktop'; did you mean 'oktopk'?"),
        (["resnet20", "--preset", "papr"], "unknown preset 'papr'; did you mean 'paper'?"),
        (["resnet20", "--values", "bf17"], "bf17"),
        (["resnet20", "--epochs", "1", "--steps", "2"], "epochs and steps exclude each other"),
        (["resnet20", "--lr", "-1"], "lr must be a positive number, got -1"),
        (["resnet20", "--density", "2"], "density must be in (0, 1], got 2"),
        (["--resume", "/nowhere"], "is not the folder of a run"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert sentence in said


def test_more_workers_than_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["resnet20", "--workers", "2", "--train-samples", "1", "--out", str(tmp_path)]
    assert main(["train", *options]) == 2
    assert "there are more ranks than samples, 2 and 1" in capsys.readouterr().err


def test_worlds_are_found_by_their_variables() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    world = found_world(torchrun)
    assert world is not None
    assert (world.launcher, world.rank, world.size, world.address, world.port) == ("torchrun", 1, 3, "a", 7)
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
    assert found_world(slurm) is None  # a batch script is alone
    world = found_world({**slurm, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[03-05,9],other"})
    assert world is not None
    assert (world.launcher, world.rank, world.size, world.address, world.port) == ("Slurm", 2, 4, "node03", 20_077)
    world = found_world({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "b"})
    assert world is not None
    assert (world.launcher, world.size, world.address, world.port) == ("MPI", 2, "b", 29_500)
    assert found_world({}) is None
    with pytest.raises(InputError, match="WORLD_SIZE must be a whole number, got 'two'"):
        found_world({**torchrun, "WORLD_SIZE": "two"})
    with pytest.raises(InputError, match="rank 5 of 3"):
        found_world({**torchrun, "RANK": "5"})


CLIP_NORM = 1e-3


class Clipping(Plan):
    """With a limit that every gradient exceeds."""

    def resolved(self) -> Preset:
        return replace(super().resolved(), clip_norm=CLIP_NORM)


def owed_after_a_step(process: RankProcess) -> float:
    plan = Clipping("resnet20", Choice("oktopk", 0.01, group_mb=None), steps=2, batch=4)
    replica = Replica(plan, WORKLOADS["resnet20"].open(limits=Limits(64, 40)))
    replica.advance(1)
    assert replica.sieve is not None
    engine = replica.sieve.engine
    sparse = [index for index, group in enumerate(engine.groups) if group.sparse]
    owed = sum(float(engine.vectors(index)["residual"].double().norm()) ** 2 for index in sparse)
    replica.close()
    return math.sqrt(owed)


def test_what_is_owed_is_of_clipped_gradients() -> None:
    """Clipped after the exchange, the means were cut and nobody owed the rest, while residuals were never clipped."""
    for norm in run_rank_processes(2, owed_after_a_step):
        assert 0.1 * CLIP_NORM < norm < 1.001 * math.sqrt(2) * CLIP_NORM


def norms_of_a_step(process: RankProcess, recipe: str) -> float:
    plan = Clipping("resnet20", Choice(recipe), steps=2, batch=4)
    replica = Replica(plan, WORKLOADS["resnet20"].open(limits=Limits(64, 40)))
    norms: list[float] = []
    replica.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in replica.bare.parameters()])))
    )
    replica.advance(1)
    replica.close()
    return norms[0]


@pytest.mark.parametrize(("recipe", "factor"), [("onebit-updates", math.sqrt(2)), ("bf16", 1.0)])
def test_own_gradients_are_clipped_at_the_root_of_ranks(recipe: str, factor: float) -> None:
    for norm in run_rank_processes(2, norms_of_a_step, recipe):
        assert norm == pytest.approx(factor * CLIP_NORM, rel=1e-2)


def rates_of_a_step(process: RankProcess) -> list[float]:
    plans = [
        Plan("resnet20", Choice(name), steps=4, batch=4, train_samples=32) for name in ("oktopk", "oktopk-nomomentum")
    ]
    rates = []
    for plan in plans:
        replica = Replica(plan, plan.open())
        replica.advance(1)
        (group,) = replica.optimizer.param_groups
        rates += [group["lr"], group["momentum"]]
        replica.close()
    return rates


def test_a_run_without_momentum_moves_at_the_rate_that_momentum_comes_to() -> None:
    rate, momentum, plain, none = run_rank_processes(1, rates_of_a_step)[0]
    assert (momentum, none) == (0.9, 0.0)
    assert plain == pytest.approx(10 * rate)


def test_variants_of_recipes() -> None:
    preset = WORKLOADS["vgg16"].preset()
    bare = Choice("oktopk-nofeedback", values="int8").build(preset)
    assert isinstance(bare.feedback, NoFeedback)
    assert bare.reducer.codec.values == "int8"
    dgc = Choice("dgc")
    assert dgc.build(preset).feedback == MomentumResidual(0.9)
    assert dgc.optimizer(preset).momentum == 0.0  # type: ignore[attr-defined]
    assert Choice("oktopk").optimizer(preset) == preset.optimizer
    corrected = Choice("oktopk-momentum")
    assert corrected.build(preset).feedback == MomentumResidual(0.9)
    assert corrected.build(preset).reducer == Choice("oktopk").build(preset).reducer
    assert corrected.optimizer(preset).momentum == 0.0  # type: ignore[attr-defined]
    plain = Choice("oktopk-nomomentum")
    assert plain.build(preset) == Choice("oktopk").build(preset)
    setting = plain.optimizer(preset)  # instead of a rate of 0.05 and a momentum of 0.9
    assert setting == Sgd(rate=pytest.approx(0.5), momentum=0.0, weight_decay=5e-4)  # type: ignore[arg-type]
    assert Choice("dgc-nomomentum").build(preset).feedback == MomentumResidual(0.0)  # or it would have both
    assert Choice("dgc-nomomentum").optimizer(preset) == setting
    assert Choice("dense-nomomentum").optimizer(preset) == setting
    assert Choice("dense-nomomentum").ddp_baseline == Choice("dense").ddp_baseline
    adam = WORKLOADS["bert"].preset()
    assert Choice("dgc").optimizer(adam) == adam.optimizer
    assert plain.optimizer(adam) == Adam(1e-3, weight_decay=0.01, betas=(0.0, 0.999))
    # A rate of its own is what the optimizer gets, whatever momentum comes to.
    assert Choice("dense", rate=0.3).optimizer(preset) == Sgd(0.3, momentum=0.9, weight_decay=5e-4)
    assert Choice("oktopk-nomomentum", rate=0.3).optimizer(preset) == Sgd(0.3, momentum=0.0, weight_decay=5e-4)
    assert Choice("oktopk", rate=0.002).optimizer(adam) == Adam(0.002, weight_decay=0.01)
    paper = WORKLOADS["resnet20"].preset("paper")
    schedule = Choice("gtopk").schedule(paper, steps_per_epoch=10)
    assert [schedule.density_at(step) for step in (0, 10, 20, 999)] == [0.015625, 0.004, 0.001, 0.001]
    with pytest.raises(UnknownNameError, match="dense-nofeedback"):
        Choice("dense-nofeedback")


def test_exchanges_of_updates_by_name() -> None:
    preset = WORKLOADS["gpt"].preset()
    updates = Choice("onebit-updates")
    assert updates.of_updates
    assert updates.ddp_baseline is None
    assert updates.optimizer(preset) == preset.optimizer
    assert updates.schedule(preset, 10).density_at(0) == 0.5
    assert isinstance(Choice("dgc-updates").build(preset).feedback, Residual)
    diloco = Choice("diloco-16")
    assert diloco.ddp_baseline is None
    assert diloco.outer == Outer(local_steps=16, rate=0.7, momentum=0.9)
    assert diloco.schedule(preset, 10).density_at(0) == 1.0
    assert Choice("local-adam-8").outer == Outer(local_steps=8)
    assert not Choice("local-adam-8").adapts
    published = Choice("sparseloco-32")
    assert published.outer == SPARSELOCO.every(32)
    assert published.of_updates
    assert not published.adapts
    assert published.schedule(preset, 10).density_at(0) == 1 / 64
    assert published.build(preset).reducer.codec.values == "twobit"
    several = Choice("oktopk-updates-8")
    assert several.outer == Outer(local_steps=8)
    assert several.adapts
    assert several.of_updates
    assert several.build(preset) == Choice("oktopk-updates").build(preset)
    assert not Choice("oktopk").of_updates


def test_one_bit_updates_have_the_code_that_suits_the_optimizer() -> None:
    """As in the library: SGD's updates differ in size between layers and need a step size per 1,024 entries."""
    sgd, adamw = Plan("resnet20", Choice("dense"), steps=4), Plan("gpt", Choice("dense"), steps=4)
    names = ["onebit-updates", "onebit-updates-8", "oktopk"]
    assert [each.values for each in sgd.choices(names, ["own"])] == ["sign", "sign", "exact"]
    assert [each.values for each in adamw.choices(names, ["own"])] == ["bit", "bit", "exact"]
    assert [each.values for each in sgd.choices(["onebit-updates"], ["bit", "own", "sign"])] == ["bit", "sign"]
    (updates,) = sgd.choices(["onebit-updates"], ["own"])
    assert updates.build(sgd.resolved()).reducer.codec.values == "sign"
    assert updates.label == "onebit-updates sign"


def test_exchanges_with_a_density_and_a_rate_of_their_own() -> None:
    names = ["onebit-updates:0.25", "topka:0.02@0.5", "topka", "dense@0.1"]
    quarter, both, plain, dense = parse_choices(Choice("dense", density=0.1), names, ["own"])
    assert (quarter.recipe, quarter.density, quarter.rate) == ("onebit-updates", 0.25, None)
    assert (both.recipe, both.density, both.rate) == ("topka", 0.02, 0.5)
    assert plain.density == 0.1
    assert [each.name for each in (quarter, both, plain, dense)] == names
    preset = WORKLOADS["gpt"].preset()
    assert quarter.schedule(preset, 10).density_at(0) == 0.25


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("topka:much", ": must be followed by a density, as in topka:0.01, got 'topka:much'"),
        ("topka@fast", "@ must be followed by a learning rate, as in topka@0.1, got 'topka@fast'"),
        ("topka:2", "density must be in (0, 1], got 2"),
        ("dense:0.1", "dense sends everything and has no density"),
        ("diloco-8:0.1", "diloco-8 sends everything and has no density"),
    ],
)
def test_marks_that_make_no_sense(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        parse_choices(Choice("dense"), [name], ["own"])


def test_a_plan_survives_json_and_stops_where_it_should() -> None:
    plan = Plan("resnet20", Choice("gtopk", 0.01), epochs=1.5, seed=3)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.total_steps(steps_per_epoch=11) == 17
    pace = Pace(total=10, log=4, evaluate=5, checkpoint=None)
    stops = [0]
    while stops[-1] < 10:
        stops.append(pace.next_stop(stops[-1]))
    assert stops == [0, 4, 5, 8, 10]
