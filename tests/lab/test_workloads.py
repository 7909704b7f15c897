"""Workloads: each learns, is decided by its seed, scores alike for any number of ranks, keeps published settings."""

from __future__ import annotations

import ast
import math
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve import InputError, UnknownNameError
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.models import MODELS
from gradsieve.lab.workloads import WORKLOADS, Limits, Sieve, Task, set_rate
from gradsieve.lab.workloads.optimizer import Adam, Sgd
from gradsieve.lab.workloads.schedule import Cosine, Exponential, Linear, Steps
from gradsieve.reducers.oktopk import OkTopk

LIMITS = Limits(train=32, test=12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of its own, and a small folder of real text, so that a vocabulary is learned in no time."""
    text = tmp_path_factory.mktemp("text")
    library = Path(sysconfig.get_paths()["stdlib"])
    for source in sorted(library.glob("[a-d]*.py")):
        (text / f"{source.stem}.txt").write_text(source.read_text())
    return {"cache": tmp_path_factory.mktemp("cache"), "text": text}


@pytest.fixture(autouse=True)
def own_cache(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSIEVE_CACHE", str(folders["cache"]))


def opened(name: str, folders: dict[str, Path]) -> Task[Any]:
    workload = WORKLOADS[name]
    preset = workload.preset(batch=4)
    if name == "bert":
        data = replace(preset.data, source="text", vocabulary=600, length=32)
        return workload.open(replace(preset, data=data), folders["text"], LIMITS)
    if name == "gpt":
        return workload.open(replace(preset, data=replace(preset.data, source="text")), folders["text"], LIMITS)
    if name == "deepspeech":
        preset = replace(preset, data=replace(preset.data, num_train=32, num_test=12))
    return workload.open(preset, limits=LIMITS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(task: Task[Any], name: str, model: torch.nn.Module, batches: Iterable[Any]) -> list[float]:
    preset = WORKLOADS[name].preset()
    optimizer, carry, losses = preset.optimizer.build(model), None, []
    set_rate(optimizer, preset.optimizer.rate * 0.2)
    for batch in batches:
        loss, carry = task.loss(model, batch, carry)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), preset.clip_norm or math.inf)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_few_steps_lower_the_loss(name: str, folders: dict[str, Path]) -> None:
    task = opened(name, folders)
    torch.manual_seed(0)
    model = task.model(0)
    batch = next(iter(task.batches(task.sampler())))
    losses = step(task, name, model, [batch] * 12)
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert all(math.isfinite(score) for score in task.evaluate(model).values())


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_decides_all(name: str, folders: dict[str, Path]) -> None:
    task = opened(name, folders)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step(task, name, task.model(seed), islice(task.batches(task.sampler(seed=seed)), 3)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("size", [2, 13])
def test_scores_do_not_depend_on_how_many_share_the_test(name: str, size: int, folders: dict[str, Path]) -> None:
    task = replace(opened(name, folders), test_batch=5)
    model = task.model(0)
    parts = [task.measure(model, rank, size) for rank in range(size)]
    torch.testing.assert_close(
        torch.stack(parts).sum(0), replace(task, test_batch=12).measure(model), rtol=1e-4, atol=1e-3
    )
    assert model.training
    scores = task.scores(sum(parts))
    assert list(scores) == [metric.name for metric in task.metrics]
    for metric in task.metrics:
        assert metric.form.format(scores[metric.name])


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_parameter_gets_a_gradient(name: str, folders: dict[str, Path]) -> None:
    """Otherwise data-parallel training would wait for what never comes."""
    task = opened(name, folders)
    model = task.model(0)
    task.loss(model, next(iter(task.batches(task.sampler())))).loss.backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_papers_preset_has_the_papers_model(name: str) -> None:
    workload = WORKLOADS[name]
    preset = workload.preset("paper")
    assert preset.size == "paper"
    assert preset.data.source in workload.sources
    architecture = MODELS[workload.model]
    given = {"lstm": preset.data, "bert": preset.data, "gpt": preset.data}.get(name)
    if given is not None:
        assert given.vocabulary == architecture.paper.vocabulary
    assert {"default", "paper"} <= set(workload.presets)
    assert workload.preset().size == "small"


def test_published_settings_are_as_published() -> None:
    vgg, speech, bert = (WORKLOADS[name].preset("paper") for name in ("vgg16", "deepspeech", "bert"))
    assert (vgg.batch, vgg.optimizer, vgg.epochs) == (16, Sgd(0.1, 0.9, 1e-4), 161)
    assert (speech.batch, speech.optimizer, speech.clip_norm) == (2, Sgd(1e-3, 0.9), 400.0)
    assert (bert.batch, bert.optimizer, bert.data.length) == (8, Adam(2e-4, 0.01), 128)
    assert [preset.sieve.density for preset in (vgg, speech, bert)] == [0.02, 0.02, 0.01]
    assert [preset.sieve.threshold_every for preset in (vgg, speech, bert)] == [32, 32, 128]
    assert {preset.sieve.repartition_every for preset in (vgg, speech, bert)} == {64}
    rates = [vgg.rate(epoch) for epoch in (5, 10, 80.9, 81, 122, 155, 161)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001])
    for name in ("resnet20", "resnet50", "alexnet", "lstm"):
        sieve = WORKLOADS[name].preset("paper").sieve
        assert [sieve.density_at(epoch) for epoch in (0, 1, 2, 50)] == [0.015625, 0.004, 0.001, 0.001]
        assert 32 <= WORKLOADS[name].preset("paper").batch <= 128


def test_a_sieve_builds_its_recipe() -> None:
    recipe = Sieve("oktopk", 0.01, threshold_every=128, repartition_every=7).build()
    assert (recipe.selector.period, recipe.reducer.repartition_every) == (128, 7)
    assert recipe.reducer.imbalance == OkTopk().imbalance
    assert Sieve("gtopk").build() == Sieve("gtopk", 0.5).build()
    with pytest.raises(InputError, match=r"density must be in \(0, 1\], got 2"):
        Sieve(density=2)
    with pytest.raises(UnknownNameError, match="unknown recipe 'oktop'"):
        Sieve("oktop").build()


@pytest.mark.parametrize("schedule", [Steps(0.1, (0.5,)), Linear(0.1), Cosine(0.1)])
def test_schedules_warm_up_and_never_rise_again(schedule: Any) -> None:
    factors = [schedule.factor(share / 100) for share in range(101)]
    assert factors[:11] == pytest.approx([share / 10 for share in range(11)])
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(factors[10:]))
    assert factors[-1] == pytest.approx(0.1 if isinstance(schedule, Steps) else 0)


def test_a_cosine_may_end_above_nothing() -> None:
    schedule = Cosine(0.05, final=0.1)
    factors = [schedule.factor(share) for share in (0.025, 0.05, 0.525, 1)]
    assert factors == pytest.approx([0.5, 1, 0.55, 0.1])
    with pytest.raises(InputError, match="final must be a factor of the base learning rate, from 0 to 1, got 2"):
        Cosine(final=2)


def test_exponential_falls_by_the_same_factor_in_equal_times() -> None:
    schedule = Exponential(hold=14 / 55, final=1.15 ** (14 - 55))
    assert schedule.factor(10 / 55) == 1
    assert schedule.factor(15 / 55) == pytest.approx(1 / 1.15)
    assert schedule.factor(1) == pytest.approx(1.15**-41)
    with pytest.raises(InputError, match="warmup must be a share of the run, from 0 to 1, got 10"):
        Linear(10)


def test_biases_and_norms_do_not_decay_under_adam() -> None:
    optimizer = Adam(1e-3, weight_decay=0.1).build(MODELS["bert"].build(MODELS["bert"].small, 0))
    decays = {group["weight_decay"]: {p.dim() for p in group["params"]} for group in optimizer.param_groups}
    assert decays == {0.1: {2}, 0.0: {1}}


def test_the_lstm_learns_from_what_it_carries(folders: dict[str, Path]) -> None:
    task = opened("lstm", folders)
    model = task.model(0)
    batches = list(task.batches(task.sampler()))[:2]
    assert [batch.fresh for batch in batches] == [True, False]
    loss, carry = task.loss(model, batches[0], None)
    assert not any(part.requires_grad for part in carry)
    with_carry, without = (float(task.loss(model, batches[1], state).loss.detach()) for state in (carry, None))
    assert with_carry != without
    ignored = float(task.loss(model, batches[0], carry).loss.detach())
    assert ignored == float(loss.detach())


def test_mistakes_are_said(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown workload 'vgg'; did you mean 'vgg16'"):
        WORKLOADS["vgg"]
    with pytest.raises(UnknownNameError, match="unknown preset 'papers'; did you mean 'paper'"):
        WORKLOADS["bert"].open("papers")
    with pytest.raises(UnknownNameError, match="unknown source of data 'cifar'; did you mean 'cifar10'"):
        WORKLOADS["vgg16"].preset(source="cifar")
    with pytest.raises(MissingDataError, match="run `gradsieve data get cifar10`"):
        WORKLOADS["vgg16"].open("paper")
    with pytest.raises(MissingDataError, match="ImageNet cannot be fetched"):
        WORKLOADS["resnet50"].open("paper")
    with pytest.raises(MissingDataError, match="AN4 cannot be fetched"):
        WORKLOADS["deepspeech"].open("paper", tmp_path)
    with pytest.raises(InputError, match="there are more ranks than samples, 33 and 32"):
        opened("vgg16", folders).sampler(0, 33)
    with pytest.raises(InputError, match="at least 1 sample is needed, got 0"):
        WORKLOADS["vgg16"].open(limits=Limits(train=0))


@pytest.mark.long
def test_the_example_of_the_docs_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "workloads.md", "exec"), {"__name__": "docs"})
    assert ast.literal_eval(capsys.readouterr().out)["accuracy"] > 0.95
