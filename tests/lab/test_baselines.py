"""The baselines do what they are known for, and the race in a network reports all of it."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import torch

from gradsieve.cli import main
from gradsieve.errors import UnknownNameError
from gradsieve.lab.baselines import BASELINES
from gradsieve.lab.baselines.batched_power_sgd import BatchedPowerSgd, approximate, square_side
from gradsieve.lab.baselines.contender import BaselineContender
from gradsieve.lab.baselines.layers import vgg16_shapes
from gradsieve.lab.bench.meter import Meter
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from support import networks

NUMEL = 30_000
RANKS = 2
STEPS = 5


@pytest.mark.parametrize("numel", [1, 9, 511, 513, 30_000, 1_000_000, 14_700_000, 66_000_000])
def test_layers_have_exactly_the_wanted_entries(numel: int) -> None:
    shapes = vgg16_shapes(numel)
    assert sum(map(prod, shapes)) == numel
    assert all(prod(shape) for shape in shapes)
    if numel >= 1_000_000:
        convolutions = [shape for shape in shapes if len(shape) == 4]
        assert len(convolutions) == 13
        assert sum(map(prod, convolutions)) > 0.98 * numel


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def exchange(process: RankProcess) -> dict[str, Any]:
    """Some steps of each baseline on the same gradient. Returns the means; the gradient must not change."""
    results = {}
    storage = torch.zeros(NUMEL)
    grad = gradient(process.rank)
    for name, baseline in BASELINES.items():
        contender = BaselineContender(baseline, storage, Meter(in_network=False))
        for _ in range(STEPS):
            measured = contender.step(grad)
            assert measured.seconds > 0
            assert measured.interface_bytes is None
        results[name] = contender.mean().numpy()
    assert torch.equal(grad, gradient(process.rank))
    return results


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    return run_rank_processes(RANKS, exchange)


TOLERANCE = {"ddp": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "quantized-8bit": 0.04}


@pytest.mark.parametrize("name", TOLERANCE)
def test_baselines_that_send_everything_give_the_mean(exchanged: list[dict[str, Any]], name: str) -> None:
    mean = sum(map(gradient, range(RANKS))) / RANKS
    for rank in exchanged:
        error = (torch.from_numpy(rank[name]) - mean).abs().max()
        assert float(error) < TOLERANCE[name]
        if name != "ddp":
            assert float(error) > 0, "nothing was rounded: is the hook at work?"


@pytest.mark.parametrize("name", ["powersgd-1", "powersgd-2", "powersgd-4", "powersgd-early-8"])
def test_power_sgd_gives_all_ranks_the_same_of_low_rank(exchanged: list[dict[str, Any]], name: str) -> None:
    ours, theirs = (torch.from_numpy(rank[name]) for rank in exchanged)
    assert torch.equal(ours, theirs)
    shapes = vgg16_shapes(NUMEL)
    widest = max(range(len(shapes)), key=lambda number: prod(shapes[number]))
    start = sum(map(prod, shapes[:widest]))
    layer = ours[start : start + prod(shapes[widest])].view(shapes[widest][0], -1)
    assert torch.linalg.matrix_rank(layer, rtol=1e-4) == int(name.split("-")[-1])


@pytest.mark.parametrize("name", ["powersgd-batched-1", "powersgd-batched-2", "powersgd-batched-4"])
def test_batched_power_sgd_gives_all_ranks_the_same(exchanged: list[dict[str, Any]], name: str) -> None:
    ours, theirs = (torch.from_numpy(rank[name]) for rank in exchanged)
    assert torch.equal(ours, theirs)
    mean = sum(map(gradient, range(RANKS))) / RANKS
    likeness = float(torch.nn.functional.cosine_similarity(ours, mean, dim=0))
    assert 0.05 < likeness < 0.9, "of noise, little is of low rank"


def test_batched_power_sgd_sees_one_square() -> None:
    numel, side = 390, 20
    assert [square_side(count) for count in (1, 2, 4, 5, numel, 400, 401)] == [1, 2, 2, 3, side, 20, 21]
    given = gradient(0)[:numel]
    means = torch.from_numpy(run_rank_processes(1, repeat_batched, numel)[0])
    for mean in means:
        square = torch.zeros(side * side)
        square[:numel] = mean
        assert torch.linalg.matrix_rank(square.view(side, side)[:-1], rtol=1e-4) == 4
    # What it lacks comes later: with one gradient again and again the means come to it.
    worth = given.square().sum()
    errors = [float((means[:count].mean(0) - given).square().sum() / worth) for count in (10, 100)]
    assert errors[1] < 0.1 * errors[0]


def repeat_batched(process: RankProcess, numel: int) -> Any:
    state, given = BatchedPowerSgd(rank=4, start=0), gradient(0)[:numel]
    means = []
    for _ in range(100):
        mean = given.clone()
        approximate(state, 0, mean)
        means.append(mean)
    return torch.stack(means).numpy()


def test_local_sgd_exchanges_no_gradients(exchanged: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(exchanged):
        assert torch.equal(torch.from_numpy(results["local-sgd"]), gradient(rank))


def test_an_unknown_baseline() -> None:
    with pytest.raises(UnknownNameError, match="unknown baseline 'powersgd'; did you mean 'powersgd-"):
        BASELINES["powersgd"]


def test_a_race_in_a_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    networks.require_networks()
    monkeypatch.setattr("gradsieve.lab.bench.site.NETWORK_NAME", networks.unique_name())
    numel = 300_000
    command = "bench reduce --network unlimited --hosts 2 --recipe oktopk --repeats 5 --json --numel"
    assert main([*command.split(), str(numel)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["recipe"]: row for row in report["results"]}
    assert set(rows) == {"gloo all_reduce", "oktopk", *(name for name, baseline in BASELINES.items() if baseline.usual)}
    assert [name for name, row in rows.items() if not row["peer"]] == ["oktopk"]
    assert {(row["network"], row["ranks"]) for row in rows.values()} == {("unlimited", 2)}
    dense = 4 * numel
    received = {name: row["interface_bytes_received_per_rank"] / dense for name, row in rows.items()}
    for name, share in {"gloo all_reduce": 1, "ddp": 1, "fp16": 0.5, "bf16": 0.5, "local-sgd": 0.25}.items():
        assert received[name] == pytest.approx(share, rel=0.15)
    assert received["quantized-8bit"] == pytest.approx(0.25, rel=0.15)
    assert received["powersgd-1"] < received["powersgd-2"] < received["powersgd-4"] < 0.25
    assert received["powersgd-batched-1"] < received["powersgd-batched-2"] < received["powersgd-batched-4"] < 0.25
    payload = rows["oktopk"]["bytes_received_per_rank"]
    assert payload < rows["oktopk"]["interface_bytes_received_per_rank"] < 1.2 * payload + 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--network swift", "got 'swift'"),
        ("--network 1gbit+soon", "latency must be between 0ms and 2s, such as 5ms, got 'soon'"),
        ("--network 1gbit --hosts 65", "hosts must be between 1 and 64, got 65"),
        ("--peer fp8", "unknown baseline 'fp8'; did you mean 'fp16'?"),
        ("--peer fp16 --no-peers", "--peer and --no-peers exclude each other"),
    ],
)
def test_mistakes_are_one_sentence(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reduce", "--numel", "1000", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
