"""`gradsieve.SGD` is torch's, bit for bit, for any number of ranks: there is nothing to correct."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsieve
from gradsieve import Comm, DistributedOptimizer, Rules
from gradsieve.testing import run_ranks
from gradsieve.updates.adapting import adapt, aware
from support.small_model import give_grads, model, trained

SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.5, "dampening": 0.25},
    {"momentum": 0.9, "maximize": True, "foreach": True},
    {"momentum": 0.9, "weight_decay": 0.01, "fused": True},
]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_torchs_bit_for_bit(settings: dict[str, Any], num_ranks: int) -> None:
    a, b = model(), model()
    ours, theirs = (
        [{"params": list(net.parameters())[:2], "lr": 0.02}, {"params": list(net.parameters())[2:]}] for net in (a, b)
    )
    optimizer, reference = gradsieve.SGD(ours, lr=0.1, **settings), torch.optim.SGD(theirs, lr=0.1, **settings)
    assert aware(optimizer, num_ranks)
    assert equal(trained(a, optimizer, range(6)), trained(b, reference, range(6)))
    mine, torchs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == torchs["param_groups"]
    assert mine["state"].keys() == torchs["state"].keys()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_live_sgd_is_adapted_in_place(settings: dict[str, Any]) -> None:
    net, other = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **settings)
    reference = torch.optim.SGD(other.parameters(), lr=0.1, **settings)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, reference)]
    trained(net, optimizer, range(3))
    trained(other, reference, range(3))
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    groups, state = optimizer.param_groups, optimizer.state
    assert adapt(optimizer) is optimizer
    assert type(optimizer) is gradsieve.SGD
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    for step in range(3, 6):
        assert equal(trained(net, optimizer, range(step, step + 1)), trained(other, reference, range(step, step + 1)))
        for scheduler in schedulers:
            scheduler.step()  # torch warns if it has not seen the optimizer step
    assert calls == ["after"] * 3
    assert optimizer.param_groups[0]["lr"] == 0.0125


def test_hooks_run_once_and_a_closure_too() -> None:
    net = model()
    torch.optim.SGD(net.parameters(), lr=0.1)  # torch wraps its class's step when it makes an object
    optimizer = gradsieve.SGD(net.parameters(), lr=0.1)
    optimizer.for_ranks(2)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        give_grads(net, 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == ["before", "closure", "after"]


def test_it_can_be_pickled() -> None:
    optimizer = gradsieve.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    assert type(pickle.loads(pickle.dumps(optimizer))) is gradsieve.SGD


def test_without_ddp_it_is_adapted_too() -> None:
    def rank(comm: Comm) -> type:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, net, exchange="updates", comm=comm, rules=Rules(min_numel=10))
        assert optimizer.sieve.adapt(optimizer) is optimizer
        return type(inner)

    assert run_ranks(2, rank) == [gradsieve.SGD] * 2
