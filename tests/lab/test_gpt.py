"""The GPT workload: three parts of a text, windows seen once, its settings, and the command."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve.cli import main
from gradsieve.errors import InputError
from gradsieve.lab.data.tokens import Tokens
from gradsieve.lab.models import MODELS
from gradsieve.lab.workloads import WORKLOADS, Limits, Task
from gradsieve.lab.workloads.generate import EVALUATED_WINDOWS
from gradsieve.lab.workloads.optimizer import Adam
from gradsieve.lab.workloads.workload import ALL

GPT = WORKLOADS["gpt"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some modules of the library as a folder of text."""
    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        (folder / f"{source.stem}.txt").write_text(source.read_text())
    return folder


def read(text: Path, evaluate: str) -> Tokens:
    tokens = GPT.preset(source="text", evaluate=evaluate).data.read(text)
    assert isinstance(tokens, Tokens)
    return tokens


def opened(text: Path, limits: Limits = ALL, evaluate: str = "test") -> Task[Any]:
    return GPT.open(GPT.preset(source="text", evaluate=evaluate), text, limits)


def test_parts_are_disjoint_and_always_the_same(text: Path) -> None:
    tested, validated = read(text, "test"), read(text, "validation")
    assert torch.equal(tested.train, validated.train)
    parts = {
        name: {line for line in bytes(part.tolist()).decode().split("\n\n") if len(line) > 200}
        for name, part in (("train", tested.train), ("test", tested.test), ("validation", validated.test))
    }
    assert all(parts.values())
    assert not parts["train"] & parts["test"]
    assert not parts["train"] & parts["validation"]
    assert not parts["validation"] & parts["test"]
    documents = [path.read_text() for path in text.iterdir()]
    assert sum(map(len, (tested.train, tested.test, validated.test))) == len("".join(documents).encode())
    assert torch.equal(read(text, "validation").test, validated.test)


def test_a_pass_shows_every_window_once_whatever_the_number_of_ranks(text: Path) -> None:
    task = opened(text, Limits(train=203))
    orders = []
    for seed in (0, 0, 1):
        draws = [list(task.sampler(rank, 3, seed)) for rank in range(3)]
        orders.append([index for rank in draws for draw in rank for index in draw.indices.tolist()])
        assert sorted(orders[-1]) == list(range(203))
    assert orders[0] == orders[1] != orders[2]
    windows = task.train.batch(torch.arange(203))
    starts = read(text, "test").train[: 203 * 64 + 1].long()
    assert torch.equal(windows.inputs.flatten(), starts[:-1])
    assert torch.equal(windows.targets.flatten(), starts[1:])


def test_scored_windows_come_from_the_whole_part(text: Path) -> None:
    part = read(text, "validation").test
    num_windows = (len(part) - 1) // 64
    task = opened(text, Limits(test=5), "validation")
    assert len(task.test) == 5
    starts = [64 * (number * num_windows // 5) for number in range(5)]
    expected = torch.stack([part[start : start + 64] for start in starts])
    assert torch.equal(task.test.batch(torch.arange(5)).inputs, expected.long())
    assert len(opened(text, evaluate="validation").test) == min(EVALUATED_WINDOWS, num_windows)
    assert len(opened(text, Limits(test=10**9), "validation").test) == num_windows


@pytest.mark.parametrize(
    ("name", "context"), [("default", 64), ("1m", 128), ("11m", 128), ("25m", 128), ("paper", 1024)]
)
def test_presets_fit_their_models(name: str, context: int) -> None:
    preset = GPT.preset(name)
    shape = MODELS["gpt"].shape(preset.size)
    assert (preset.data.length, preset.data.vocabulary) == (context, shape.vocabulary)
    assert shape.context == context
    assert (preset.batch, preset.clip_norm) == (4, 1.0)
    assert isinstance(preset.optimizer, Adam)
    assert (preset.optimizer.betas, preset.optimizer.weight_decay) == ((0.9, 0.95), 0.1)
    rates = [preset.rate(share * preset.epochs) / preset.optimizer.rate for share in (0.025, 0.05, 1)]
    assert rates == pytest.approx([0.5, 1, 0.1])


def test_only_matrices_decay(text: Path) -> None:
    groups = GPT.preset().optimizer.build(opened(text).model()).param_groups
    assert {group["weight_decay"]: {p.dim() for p in group["params"]} for group in groups} == {0.1: {2}, 0.0: {1}}


def test_the_context_is_a_setting(text: Path) -> None:
    preset = GPT.preset(source="text")
    task = GPT.open(replace(preset, data=replace(preset.data, length=32)), text)
    assert task.shape.context == 32
    assert task.num_parameters() == 435_456 - 32 * 128


def train(text: Path, out: Path, *options: str) -> None:
    shared = ["gpt", "--source", "text", "--data", str(text), "--workers", "2", "--steps", "6", "--test-samples", "32"]
    assert main(["train", *shared, "--log-every", "3", "--out", str(out), "--json", *options]) == 0


def test_the_command_trains_and_says_which_part_it_scored(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    for part in ("test", "validation"):
        train(text, tmp_path / part, "--recipe", "oktopk", "--density", "0.02", "--evaluate", part)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        start, end = lines[0], lines[-1]
        assert (start["event"], end["event"]) == ("start", "end")
        assert (start["workers"], start["parameters"], start["batch"], start["test_samples"]) == (2, 435_456, 4, 32)
        assert start["metrics"] == ["loss", "accuracy"] == list(end["scores"])
        assert (end["evaluated"], end["steps"], end["replicas_equal"]) == (part, 6, True)
        losses = [line["loss"] for line in lines if line["event"] == "train"]
        assert losses[-1] < losses[0] < 5.7
        assert 2 < end["scores"]["loss"] < 5.6
        assert 0 < end["bytes_received_per_step"] < 435_456 * 4 / 5
        ends.append(end)
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["scores"] != ends[1]["scores"]


def test_a_workload_without_a_validation_part_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lstm", "--evaluate", "validation"]) == 2
    assert "lstm can only be evaluated on test, got 'validation'" in capsys.readouterr().err
    with pytest.raises(InputError, match="gpt can only be evaluated on test or validation, got 'train'"):
        GPT.preset(evaluate="train")
