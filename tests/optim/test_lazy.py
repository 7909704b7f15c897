"""LazyAdam: second moments over deliveries, whatever the number of steps in between."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsieve
from gradsieve.cli import main
from gradsieve.errors import InputError
from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.workloads import WORKLOADS
from gradsieve.optim import LazyAdam

RATE = 0.01


def vector(numel: int = 100, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, numel, dtype=dtype))


def gradients(numel: int, steps: int, density: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(steps)]
    return [grad * (torch.rand(numel, generator=generator) < density) for grad in dense]


def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        parameter.grad = grad.clone().view_as(parameter)
        optimizer.step()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_with_everything_delivered_it_is_adam_without_first_moments(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = vector(dtype=dtype), vector(dtype=dtype)
    grads = gradients(100, 60, dtype=dtype)
    run(LazyAdam([ours], RATE, 0.99), ours, grads)
    run(torch.optim.Adam([theirs], RATE, (0.0, 0.99)), theirs, grads)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)  # the means are updated in another order


def test_what_comes_first_after_many_steps_moves_by_the_rate_and_not_by_its_root_times_that() -> None:
    """A language model's test loss jumped from 7.2 to 8.3: Adam moved what had been owed for t steps sqrt(t) rates."""
    moved = []
    for make in (LazyAdam, lambda params, lr: torch.optim.Adam(params, lr, (0.0, 0.999))):
        parameter = nn.Parameter(torch.zeros(2))
        late = [torch.tensor([1.0, 0.0])] * 99 + [torch.tensor([1.0, 3.0])]
        run(make([parameter], RATE), parameter, late)
        moved.append(-parameter[1].item())
    assert moved[0] == pytest.approx(RATE)
    assert moved[1] > 9 * RATE


def test_what_is_not_delivered_does_not_change() -> None:
    parameter = vector(1000)
    optimizer = LazyAdam([parameter], RATE)
    run(optimizer, parameter, gradients(1000, 5))
    before, state = parameter.detach().clone(), copy.deepcopy(optimizer.state[parameter])
    run(optimizer, parameter, gradients(1000, 1, density=0.02))
    kept = parameter.grad == 0
    assert 950 < int(kept.sum()) < 1000
    assert torch.equal(parameter[kept], before[kept])
    assert (parameter[~kept] != before[~kept]).all()
    for name, values in optimizer.state[parameter].items():
        assert torch.equal(values[kept], state[name][kept])
        assert (values[~kept] != state[name][~kept]).all()


def test_a_mean_is_over_deliveries_alone() -> None:
    """Whatever lies in between: so two runs that deliver the same end at the same place."""
    often, seldom = vector(), vector()
    grads = gradients(100, 20)
    run(LazyAdam([often], RATE), often, grads)
    run(LazyAdam([seldom], RATE), seldom, [each for grad in grads for each in (torch.zeros(100), grad)])
    assert torch.equal(often, seldom)


def test_counting_ends_where_the_correction_does() -> None:
    parameter = vector(10)
    optimizer = LazyAdam([parameter], RATE, beta=0.5)  # negligible after 24
    run(optimizer, parameter, gradients(10, 30))
    assert optimizer.state[parameter]["deliveries"].tolist() == [24] * 10


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    grads = gradients(500, 40, density=0.1)
    whole, halves = vector(500), vector(500)
    run(LazyAdam([whole], RATE), whole, grads)
    first = LazyAdam([halves], RATE)
    run(first, halves, grads[:20])
    second = LazyAdam([halves], lr=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, halves, grads[20:])
    assert torch.equal(whole, halves)


def test_a_copy_goes_on_as_the_original_does() -> None:
    """torch copies and pickles an optimizer without what it has beside its state: the copy could not step."""
    parameter, grads = vector(), gradients(100, 4)
    optimizer = LazyAdam([parameter], RATE)
    run(optimizer, parameter, grads[:2])
    copied, other = copy.deepcopy((parameter, optimizer))
    before = copied.detach().clone()
    run(optimizer, parameter, grads[2:])
    run(other, copied, grads[2:])
    assert torch.equal(parameter, copied)
    assert not torch.equal(copied, before)


def test_other_layouts_of_memory() -> None:
    plain = nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)))
    turned = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    assert not turned.is_contiguous()
    grads = gradients(300, 10, density=0.3)
    for parameter in (plain, turned):
        run(LazyAdam([parameter], RATE), parameter, grads)
    assert torch.equal(plain, turned)


def test_decay_is_apart_from_the_gradient_and_for_all() -> None:
    parameter = nn.Parameter(torch.ones(3))
    run(LazyAdam([parameter], 0.1, weight_decay=0.5), parameter, [torch.tensor([0.0, 2.0, 0.0])])
    assert parameter.tolist() == pytest.approx([0.95, 0.85, 0.95])


def test_a_closure_is_called_and_gradients_may_be_missing() -> None:
    used, unused = vector(), vector()
    optimizer = LazyAdam([used, unused], RATE)

    def closure() -> Tensor:
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(34.0067, abs=1e-3)
    assert not torch.equal(used, vector())
    assert torch.equal(unused, vector())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": -1.0}, "lr must be finite and not negative, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite and not negative, got nan"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite and not negative, got inf"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        LazyAdam([vector()], **settings)


def test_short_parameters_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(InputError, match="float32 and float64 parameters, got torch.bfloat16"):
        LazyAdam([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(InputError, match="not sparse ones"):
        LazyAdam([parameter]).step()


def test_the_ending_of_a_recipe_chooses_it() -> None:
    preset = WORKLOADS["lstm"].preset("medium")
    setting = Choice("oktopk-lazy", rate=0.008).optimizer(preset)
    built = setting.build(nn.Linear(3, 2))
    assert isinstance(built, gradsieve.LazyAdam)
    assert [group["lr"] for group in built.param_groups] == [0.008, 0.008]
    assert isinstance(Choice("dense-lazy").optimizer(preset).build(nn.Linear(3, 2)), LazyAdam)
    assert Choice("dense-lazy").ddp_baseline == Choice("dense").ddp_baseline
    assert not isinstance(Choice("oktopk").optimizer(preset).build(nn.Linear(3, 2)), LazyAdam)


@pytest.mark.parametrize(
    "command", ["compare resnet20 --recipes dense,oktopk-lazy", "bench train vgg16 --recipe dense oktopk-lazy"]
)
def test_nobody_starts_before_it_is_known_that_sgd_cannot_be_lazy(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Workers had been started, and the sentence was one rank's."""
    assert main([*command.split(), "--out", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.startswith("gradsieve: error: -lazy is a variant of Adam")
    assert not (tmp_path / "runs").exists()


def test_where_sgd_trains_there_is_nothing_lazy() -> None:
    with pytest.raises(InputError, match="this workload is trained with SGD: use a name without -lazy"):
        Plan("resnet20", Choice("oktopk-lazy"), steps=4)
