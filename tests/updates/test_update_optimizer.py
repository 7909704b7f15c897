"""`DistributedOptimizer(exchange="updates")`: any optimizer steps on own gradients, and its updates are exchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsieve
from gradsieve import Comm, DistributedOptimizer, Outer, Rules
from gradsieve.recipes import recipe
from gradsieve.testing import run_ranks
from support.updates_models import Lion

RULES = Rules(min_numel=100)


MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.003),
}


torch.manual_seed(5)
START = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def net() -> nn.Sequential:
    """A copy: ranks are threads, and share one random generator."""
    return copy.deepcopy(START)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(97 * step + rank))
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def train(model: nn.Module, optimizer: DistributedOptimizer, comm: Comm, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("recipe", "density"), [("onebit", 0.5), ("oktopk", 0.05)])
def test_any_optimizer_learns_and_replicas_are_equal(make: Any, recipe: str, density: float) -> None:
    def rank(comm: Comm) -> tuple[float, float, Tensor]:
        model = net()
        optimizer = DistributedOptimizer(
            make(model.parameters()), model, recipe, density=density, exchange="updates", comm=comm, rules=RULES
        )
        with torch.no_grad():
            before = float(loss_of(model, 9, 1000))
        train(model, optimizer, comm, range(60))
        with torch.no_grad():
            return before, float(loss_of(model, 9, 1000)), flat(model)

    results = run_ranks(3, rank)
    assert all(torch.equal(model, results[0][2]) for _, _, model in results)
    assert results[0][1] < 0.6 * results[0][0]


def test_nothing_is_lost() -> None:
    """The sum of all local models is the start's minus all steps, exactly: gradients are whole numbers."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        model = nn.Linear(20, 30, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(
            inner, model, "topka", density=0.02, exchange="updates", comm=comm, rules=RULES
        )
        given = torch.zeros(600, dtype=torch.float64)
        for step in range(7):
            generator = torch.Generator().manual_seed(31 * step + comm.rank)
            model.weight.grad = torch.randint(-9, 10, (30, 20), generator=generator).double()
            given -= model.weight.grad.flatten()
            optimizer.step()
        engine: Any = optimizer.sieve.engine
        return engine.shared["weight"] - engine.residual("weight"), given

    results = run_ranks(4, rank)
    assert torch.equal(sum(local for local, _ in results), sum(given for _, given in results))


def test_local_steps_exchange_every_so_many() -> None:
    def rank(comm: Comm) -> list[int]:
        model = net()
        optimizer = DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), model, "dense", density=1.0, exchange="updates", local_steps=3,
            outer=Outer(momentum=0.5), comm=comm, rules=RULES,
        )  # fmt: skip
        counts = []
        for step in range(7):
            train(model, optimizer, comm, range(step, step + 1))
            counts.append(optimizer.sieve.stats.steps)
        return counts

    assert run_ranks(2, rank) == [[0, 0, 1, 1, 1, 2, 2]] * 2


@pytest.mark.parametrize("ahead", [True, False])
def test_a_resumed_run_equals_the_uninterrupted_one(ahead: bool) -> None:
    def rank(comm: Comm) -> bool:
        def started(model: nn.Module) -> DistributedOptimizer:
            inner = MAKERS["adamw"](model.parameters())
            outer = Outer(local_steps=2, momentum=0.3, decay=0.9, ahead=ahead)
            return DistributedOptimizer(inner, model, exchange="updates", outer=outer, comm=comm, rules=RULES)

        straight, half, again = net(), net(), net()
        train(straight, one := started(straight), comm, range(9))
        train(half, two := started(half), comm, range(5))
        model, state = copy.deepcopy(half.state_dict()), copy.deepcopy(two.state_dict())
        three = started(again)
        again.load_state_dict(model)
        three.load_state_dict(state)
        train(again, three, comm, range(5, 9))
        same = [
            torch.equal(a, b)
            for a, b in zip(one.sieve.engine.vectors(0).values(), three.sieve.engine.vectors(0).values(), strict=True)
        ]
        return torch.equal(flat(straight), flat(again)) and all(same)

    assert run_ranks(3, rank) == [True] * 3


@pytest.mark.parametrize(("exchange", "factor"), [("updates", 2.0), ("gradients", 1.0)])
def test_clipping_without_ddp(exchange: Any, factor: float) -> None:
    """Own gradients at the limit times the root of four ranks, the mean at the limit."""

    def rank(comm: Comm) -> tuple[float, Tensor]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, "topka", density=0.5, exchange=exchange, comm=comm, rules=RULES)
        (1000 * loss_of(model, comm.rank, 0)).backward()
        if exchange == "gradients":
            optimizer.exchange()
        assert optimizer.sieve.clip_grad_norm_(0.25) > 1
        clipped = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        return clipped, flat(model)

    results = run_ranks(4, rank)
    assert [norm for norm, _ in results] == pytest.approx([factor * 0.25] * 4, rel=1e-4)
    assert all(torch.equal(model, results[0][1]) for _, model in results)


def test_what_does_not_fit_is_refused() -> None:
    def rank(comm: Comm) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for pattern, options in (
            ("exchange must be 'gradients' or 'updates', got 'weights'", {"exchange": "weights"}),
            ("are for exchange='updates', got exchange='gradients'", {"density": 0.1, "local_steps": 2}),
            (
                "a scaler may skip the step of one rank only",
                {"exchange": "updates", "scaler": torch.amp.GradScaler("cpu")},
            ),
            ("density must be given with recipe oktopk", {}),
        ):
            with pytest.raises(gradsieve.InputError, match=pattern):
                DistributedOptimizer(inner, model, comm=comm, **options)
        with pytest.raises(gradsieve.InputError, match="needs the model itself"):
            DistributedOptimizer(inner, model.named_parameters(), exchange="updates", comm=comm)
        optimizer = DistributedOptimizer(inner, model, exchange="updates", comm=comm, rules=RULES)
        with pytest.raises(gradsieve.InputError, match=r"exchanged by step\(\)"):
            optimizer.exchange()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("local_steps must be at least 1, got 0", {"local_steps": 0}),
        ("the outer rate must be positive, got 0", {"rate": 0}),
        ("the outer momentum must be in", {"momentum": 1.0}),
        ("the decay of residuals must be in", {"decay": 1.5}),
    ],
)
def test_outer_settings_are_checked(pattern: str, settings: dict[str, Any]) -> None:
    with pytest.raises(gradsieve.InputError, match=pattern):
        Outer(**settings)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (torch.optim.AdamW, "bit"),
        (torch.optim.Adam, "bit"),
        (lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9), "sign"),
        (lambda parameters: torch.optim.Adagrad(parameters), "sign"),
    ],
)
def test_the_value_code_suits_the_optimizer(make: Any, code: str) -> None:
    """One step size for all layers cost SGD more than a point of CIFAR-10's accuracy, and suits Adam."""

    def rank(comm: Comm) -> list[str]:
        model = net()
        chosen = [{}, {"recipe": "onebit"}, {"recipe": recipe("onebit", values="int8"), "density": 0.5}]
        made = [
            DistributedOptimizer(make(model.parameters()), model, exchange="updates", comm=comm, **settings)
            for settings in chosen
        ]
        return [each.sieve.engine.settings.recipe.reducer.codec.values for each in made]

    assert run_ranks(2, rank) == [[code, code, "int8"]] * 2


def test_adams_small_parameters_travel_as_bits_too() -> None:
    """Their all_reduce cost a call per step, and more bytes than one bit of all matrices at low densities."""

    def rank(comm: Comm) -> list[list[bool]]:
        found = []
        for make, settings in (
            (torch.optim.AdamW, {}),
            (torch.optim.AdamW, {"rules": Rules(min_numel=10)}),
            (torch.optim.AdamW, {"recipe": "topka", "density": 0.1, "rules": None}),
            (lambda parameters: torch.optim.SGD(parameters, 0.1), {}),
        ):
            model = net()
            made = DistributedOptimizer(make(model.parameters()), model, exchange="updates", comm=comm, **settings)
            found.append(sorted({group.sparse for group in made.sieve.engine.groups}))
        return found

    assert run_ranks(2, rank)[0] == [[True], [False, True], [False], [False]]
