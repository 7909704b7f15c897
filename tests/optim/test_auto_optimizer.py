"""`DistributedOptimizer(recipe="auto")`: loops without DDP. Times are made up where a test needs a certain decision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsieve import Comm, DistributedOptimizer, Rules
from gradsieve.testing import run_ranks
from support.decisions import DENSE_LOSES, DENSE_WINS, chosen, scripted

RULES = Rules(min_numel=100)
torch.manual_seed(5)
START = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(97 * step + rank))
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def made(comm: Comm, exchange: Any, make: Any = None) -> tuple[nn.Module, DistributedOptimizer]:
    model = copy.deepcopy(START)
    inner = (make or (lambda p: torch.optim.AdamW(p, lr=0.01)))(model.parameters())
    density = 0.05 if exchange == "gradients" else None
    return model, DistributedOptimizer(inner, model, "auto", density=density, exchange=exchange, comm=comm, rules=RULES)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_it_changes_with_the_times_and_replicas_stay_equal(exchange: str) -> None:
    def rank(comm: Comm) -> tuple[list[str | None], Tensor, list[int]]:
        model, optimizer = made(comm, exchange)
        times = scripted(optimizer.sieve, DENSE_WINS)
        seen, dense = [], []
        for start, now in ((0, DENSE_WINS), (40, DENSE_LOSES), (90, DENSE_WINS | {"onebit": 99.0, "oktopk": 99.0})):
            times.update(now)
            train(model, optimizer, comm.rank, range(start, start + 50))
            seen.append(chosen(optimizer.sieve))
            dense.append(optimizer.sieve.stats.dense_steps)
        assert optimizer.sieve.stats.steps == 150
        return seen, flat(model), dense

    found = run_ranks(3, rank)
    sparse = {"gradients": "oktopk", "updates": "onebit"}[exchange]
    for seen, parameters, dense in found:
        assert seen == ["dense", sparse, "dense"]
        assert torch.equal(parameters, found[0][1])
        assert dense[0] >= 25
        assert dense[2] - dense[1] >= 10


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_dense_learns_as_one_process_with_all_data(exchange: str) -> None:
    """Plain SGD has no state: once all is delivered, the parameters are those of the mean gradient at each step."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        model, optimizer = made(comm, exchange, lambda p: torch.optim.SGD(p, lr=0.1))
        scripted(optimizer.sieve, DENSE_WINS)
        train(model, optimizer, comm.rank, range(60))
        assert chosen(optimizer.sieve) == "dense"
        whole = copy.deepcopy(model)
        train(model, optimizer, comm.rank, range(60, 65))
        for step in range(60, 65):
            whole.zero_grad()
            sum(loss_of(whole, each, step) for each in range(2)).backward()
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter -= 0.05 * parameter.grad
        return flat(model), flat(whole)

    for ours, theirs in run_ranks(2, rank):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_parameter_that_no_rank_uses_is_not_decayed() -> None:
    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        model = nn.ModuleDict({"used": copy.deepcopy(START), "unused": nn.Linear(4, 4)})
        for parameter in model["unused"].parameters():
            nn.init.ones_(parameter)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        optimizer = DistributedOptimizer(inner, model, "auto", exchange="updates", comm=comm, rules=RULES)
        scripted(optimizer.sieve, DENSE_WINS)
        train(model["used"], optimizer, comm.rank, range(60))
        assert chosen(optimizer.sieve) == "dense"
        return flat(model["unused"]), flat(model["used"])

    found = run_ranks(2, rank)
    assert torch.equal(found[0][0], torch.ones(20))
    assert torch.equal(found[0][1], found[1][1])


def test_one_rank_has_nothing_to_choose() -> None:
    for exchange in ("gradients", "updates"):
        (done,) = run_ranks(1, lambda comm, exchange=exchange: made(comm, exchange)[1].sieve.engine.decision is None)
        assert done
