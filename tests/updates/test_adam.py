"""Adam and AdamW for ranks that step on their own gradients: torch's own with one rank, corrected with more."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import gradsieve
from gradsieve.updates.adam import LEVELS_PER_DOUBLING
from gradsieve.updates.adapting import adapt, aware
from gradsieve.updates.signal import ENERGY, SIGNAL
from support.small_model import give_grads, model, trained

SETTINGS: list[dict[str, Any]] = [
    {},
    {"fused": True},
    {"foreach": True},
    {"amsgrad": True, "weight_decay": 0.3},
    {"maximize": True, "betas": (0.0, 0.95)},
    {"betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1},
]
PAIRS = [(gradsieve.AdamW, torch.optim.AdamW), (gradsieve.Adam, torch.optim.Adam)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["AdamW", "Adam"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_with_one_rank_it_is_torchs_bit_for_bit(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    a, b = model(), model()
    groups = [{"params": list(b.parameters())[:2], "lr": 0.02}, {"params": list(b.parameters())[2:]}]
    mine = [{"params": list(a.parameters())[:2], "lr": 0.02}, {"params": list(a.parameters())[2:]}]
    left = trained(a, ours(mine, lr=0.01, **settings), range(6))
    right = trained(b, theirs(groups, lr=0.01, **settings), range(6))
    assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def stepped(size: int, num_ranks: int, share: float, steps: int) -> tuple[nn.Parameter, gradsieve.AdamW]:
    """One parameter with noise as gradient, whose signal's share has been measured."""
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = gradsieve.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.for_ranks(num_ranks)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(size, generator=generator)
        optimizer.step()
    optimizer.state[parameter].update({SIGNAL: share, ENERGY: 1.0})
    return parameter, optimizer


@pytest.mark.parametrize(("measured", "expected"), [(0.3, 0.3), (-0.2, 0.0), (1.2, 1.0)])
def test_the_signals_share_is_a_share(measured: float, expected: float) -> None:
    """Estimates of a share near 0 or 1 may be beyond."""
    parameter, optimizer = stepped(10, 4, measured, 1)
    assert optimizer.signal_share(parameter) == expected


def test_without_a_measurement_a_step_is_not_made_larger() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert gradsieve.AdamW([parameter]).signal_share(parameter) == 1


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_denominator_is_that_of_the_ranks_mean(share: float) -> None:
    """With noise alone the mean of 16 ranks has a sixteenth of the variance: updates are 4 times as large."""
    parameter, optimizer = stepped(20_000, 16, share, 60)
    state = optimizer.state[parameter]
    before = parameter.detach().clone()
    parameter.grad = torch.randn(20_000, generator=torch.Generator().manual_seed(9))
    optimizer.step()
    factor = math.sqrt(share + (1 - share) / 16)
    corrections = 1 - 0.9 ** float(state["step"]), 1 - 0.95 ** float(state["step"])
    update = (
        0.01 * (state["exp_avg"] / corrections[0]) / ((state["exp_avg_sq"] / corrections[1]).sqrt() * factor + 1e-8)
    )
    moved = before - parameter.detach()
    # The factor is rounded to a level, half a level at most.
    assert torch.allclose(moved, update, rtol=2 ** (0.6 / LEVELS_PER_DOUBLING) - 1, atol=1e-7)


def test_weight_decay_is_not_corrected() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = gradsieve.AdamW([parameter], lr=0.1, weight_decay=0.5)
    optimizer.for_ranks(64)
    for seed in range(40):
        parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    with torch.no_grad():
        parameter.fill_(1.0)
    parameter.grad = torch.zeros(1000)
    optimizer.state[parameter]["exp_avg"].zero_()
    optimizer.step()
    assert torch.allclose(parameter, torch.full((1000,), 1 - 0.1 * 0.5), atol=1e-6)


def test_groups_and_their_rates_survive_a_corrected_step() -> None:
    net = model()
    optimizer = gradsieve.AdamW([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(net.parameters())])
    optimizer.for_ranks(4)
    trained(net, optimizer, range(5))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.03, 0.04]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1] * 4


def test_resumed_equals_uninterrupted() -> None:
    whole, cut = model(), model()
    one = gradsieve.AdamW(whole.parameters(), lr=0.01)
    two = gradsieve.AdamW(cut.parameters(), lr=0.01)
    one.for_ranks(4)
    two.for_ranks(4)
    expected = trained(whole, one, range(9))
    trained(cut, two, range(4))
    again = gradsieve.AdamW(cut.parameters(), lr=0.5)
    again.for_ranks(4)
    again.load_state_dict(copy.deepcopy(two.state_dict()))
    assert all(torch.equal(x, y) for x, y in zip(trained(cut, again, range(4, 9)), expected, strict=True))


def test_a_live_optimizer_is_adapted_in_place() -> None:
    net, other = model(), model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trained(net, optimizer, range(3))
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    adapted = adapt(optimizer)
    assert adapted is optimizer
    assert isinstance(optimizer, gradsieve.AdamW)
    adapted.for_ranks(4)
    reference = gradsieve.AdamW(other.parameters(), lr=0.01, fused=True)
    trained(other, reference, range(3))
    reference.for_ranks(4)
    assert all(
        torch.equal(x, y)
        for x, y in zip(trained(net, optimizer, range(3, 8)), trained(other, reference, range(3, 8)), strict=True)
    )
    assert calls == ["after"] * 5
    scheduler.step()  # torch warns if it has not seen the optimizer step
    assert optimizer.param_groups[0]["lr"] == 0.005


@pytest.mark.parametrize("followed", [False, True], ids=["alone", "with a scheduler"])
def test_accelerates_wrapper_with_a_scaler_steps_the_adapted_form(followed: bool) -> None:
    """It remembers the optimizer's `step` when it is made: the correction was lost without a word."""
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is in the extra frontends")
    accelerate.Accelerator(cpu=True)  # its wrapper needs it
    net, other = model(), model()
    optimizer, reference = torch.optim.AdamW(net.parameters(), lr=0.01), gradsieve.AdamW(other.parameters(), lr=0.01)
    if followed:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
    wrapper.scaler.scale(torch.ones(1))  # so that it has a scale
    for num_ranks, steps in ((1, range(2)), (4, range(2, 8))):
        if num_ranks > 1:
            assert aware(wrapper, num_ranks)
            assert type(optimizer) is gradsieve.AdamW
        reference.for_ranks(num_ranks)
        ours, theirs = trained(net, wrapper, steps), trained(other, reference, steps)
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert not wrapper.step_was_skipped
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_hooks_run_once_per_step() -> None:
    net = model()
    torch.optim.AdamW(net.parameters())  # torch wraps its class's step when it makes an object
    optimizer = gradsieve.AdamW(net.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    trained(net, optimizer, range(2))
    optimizer.for_ranks(4)
    trained(net, optimizer, range(2))
    assert calls == ["before", "after"] * 4


def test_a_closure_is_called_once() -> None:
    net = model()
    optimizer = gradsieve.AdamW(net.parameters())
    optimizer.for_ranks(2)
    calls: list[int] = []

    def closure() -> float:
        calls.append(1)
        give_grads(net, 0)
        assert torch.is_grad_enabled()
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [1]


def test_a_correction_follows_the_number_of_ranks() -> None:
    """Levels are remembered, but not beyond what they depend on."""
    parameter, optimizer = stepped(1000, num_ranks=4, share=0.0, steps=5)
    before = optimizer._level(parameter)
    optimizer.for_ranks(16)
    assert optimizer._level(parameter) < before
    optimizer.for_ranks(4)
    assert optimizer._level(parameter) == before
    optimizer.state[parameter][SIGNAL] = optimizer.state[parameter][ENERGY]
    assert optimizer._level(parameter) == 0
