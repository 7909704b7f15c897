"""Optimizers that exchange when they step: equal replicas, the papers' forms, what is refused. Ranks as threads."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import InputError, MismatchError, Rules
from gradsieve.comm import Comm
from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from gradsieve.optim import DistributedOptimizer, GaussianKSGD, GTopkSGD, LazyAdam, OkTopkSGD
from gradsieve.recipes import RECIPES
from gradsieve.testing import run_ranks

RANKS = 4
Make = Callable[..., Any]


class Net(nn.Module):
    """Two matrices that go sparse, two biases that go dense."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(40, 60)
        self.second = nn.Linear(60, 50)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def wrapped(model: Any, lr: float, *, recipe: str = "oktopk", momentum: float = 0.5, **options: Any) -> Any:
    parameters = model.parameters() if isinstance(model, nn.Module) else [tensor for _, tensor in model]
    inner = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    return DistributedOptimizer(inner, model, recipe, **options)


def wrapped_lazy(model: Any, lr: float, **options: Any) -> Any:
    parameters = model.parameters() if isinstance(model, nn.Module) else [tensor for _, tensor in model]
    return DistributedOptimizer(LazyAdam(parameters, lr), model, "oktopk", **options)


MAKERS: dict[str, Make] = {
    "wrapped": wrapped,
    "wrapped dgc": lambda model, lr, **options: wrapped(model, lr, recipe="dgc", momentum=0.0, **options),
    "wrapped LazyAdam": lambda model, lr, **options: wrapped_lazy(model, lr, **options),
    "OkTopkSGD": OkTopkSGD,
    "GTopkSGD": GTopkSGD,
    "GaussianKSGD": GaussianKSGD,
}
RATES = {"wrapped LazyAdam": 0.01}  # Adam's are lengths, not factors of a gradient
MOMENTUM = {"wrapped": 0.5, "OkTopkSGD": 0.0, "GTopkSGD": 0.9, "GaussianKSGD": 0.9}
SPARSE = Rules(min_numel=1000)


def backward(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def whole_grads(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, parameter.shape, generator=generator).float() for parameter in model.parameters()]


def give_whole_grads(model: nn.Module, rank: int, step: int) -> None:
    for parameter, grad in zip(model.parameters(), whole_grads(model, 100 * step + rank), strict=True):
        parameter.grad = grad


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def owed(optimizer: Any) -> list[Tensor]:
    engine = optimizer.sieve.engine
    return [v.clone() for index in range(len(engine.groups)) for v in engine.vectors(index).values()]


@pytest.mark.parametrize("maker", MAKERS)
def test_replicas_stay_equal_and_learn(maker: str) -> None:
    def run(comm: Comm) -> tuple[list[Tensor], float, float]:
        model = Net()
        optimizer = MAKERS[maker](model, RATES.get(maker, 0.2), density=0.05, rules=SPARSE, comm=comm)
        first = float(backward(model, 0, 99))
        train(model, optimizer, comm.rank, range(30))
        assert optimizer.sieve.stats.steps == 30
        assert 0 < optimizer.sieve.stats.selected_entries < 30 * 0.2 * optimizer.sieve.engine.sparse_numel
        return values(model), first, float(backward(model, 0, 99))

    results = run_ranks(RANKS, run)
    assert all(same(results[0][0], result[0]) for result in results)
    assert results[0][2] < 0.8 * results[0][1]


@pytest.mark.parametrize("maker", MOMENTUM)
def test_density_one_is_sgd_on_the_mean_exactly_on_whole_numbers(maker: str) -> None:
    plain = Net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.125, momentum=MOMENTUM[maker])
    for step in range(4):
        grads = [whole_grads(plain, 100 * step + rank) for rank in range(RANKS)]
        for parameter, *each in zip(plain.parameters(), *grads, strict=True):
            parameter.grad = torch.stack(each).sum(0) / RANKS
        reference.step()

    def run(comm: Comm) -> None:
        model = Net()
        optimizer = MAKERS[maker](model, 0.125, density=1.0, comm=comm)
        for step in range(4):
            give_whole_grads(model, comm.rank, step)
            optimizer.step()
        assert same(values(model), values(plain))

    run_ranks(RANKS, run)


def test_density_one_is_sgd_on_the_mean_to_rounding() -> None:
    plain = Net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        reference.zero_grad()
        for rank in range(3):
            backward(plain, rank, step)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3
        reference.step()

    def run(comm: Comm) -> None:
        model = Net()
        train(model, wrapped(model, 0.1, density=1.0, comm=comm), comm.rank, range(4))
        for ours, theirs in zip(values(model), values(plain), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    run_ranks(3, run)


LEARNING_RATES = [0.1, 0.1, 0.1, 0.01, 0.01, 0.3]


def algorithm_2(comm: Comm, names: tuple[str, ...], density: float) -> list[Tensor]:
    """Ok-Topk SGD as in the paper, on one flat vector: written out with the parts, without pipeline or engine."""
    model = Net()
    parameters = dict(model.named_parameters())
    weights = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    recipe = RECIPES["oktopk"]()
    k = round(density * weights.numel())
    selector_state, reducer_state = recipe.selector.init(weights.numel()), recipe.reducer.init(weights.numel(), comm)
    residual = torch.zeros_like(weights)
    for step, lr in enumerate(LEARNING_RATES):
        give_whole_grads(model, comm.rank, step)
        grad = torch.cat([parameters[name].grad.reshape(-1) for name in names])
        accumulated = residual + lr * grad
        local, selector_state = recipe.selector(accumulated, k, selector_state, None)
        (total, leftover), reducer_state = recipe.reducer(local, k, reducer_state, comm)
        residual = accumulated.clone()
        residual[local.indices.long()] = 0
        residual += leftover.to_dense()
        weights -= total.to_dense() / comm.size
    return [weights, residual]


def test_ok_topk_sgd_is_algorithm_2() -> None:
    rules = Rules(include=("*",))

    def run(comm: Comm) -> None:
        model = Net()
        optimizer = OkTopkSGD(model, LEARNING_RATES[0], density=0.03, rules=rules, comm=comm)
        for step, lr in enumerate(LEARNING_RATES):
            give_whole_grads(model, comm.rank, step)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            assert same([p.grad for p in model.parameters()], whole_grads(model, 100 * step + comm.rank))
        (group,) = optimizer.sieve.engine.groups
        weights, residual = algorithm_2(comm, group.names, 0.03)
        parameters = dict(model.named_parameters())
        assert torch.equal(torch.cat([parameters[name].detach().reshape(-1) for name in group.names]), weights)
        assert torch.equal(owed(optimizer)[0], residual)
        assert residual.count_nonzero() > weights.numel() // 2

    run_ranks(3, run)


@pytest.mark.parametrize("rates", [[0.25] * 5, [0.25, 0.25, 0.25, 0.03125, 0.03125]])
def test_a_changed_learning_rate_tells_the_two_units_apart(rates: list[float]) -> None:
    """Powers of two scale exactly: so both forms agree bit for bit until the rate changes."""

    def run(comm: Comm) -> None:
        outcomes = []
        for make in (OkTopkSGD, lambda *a, **k: wrapped(*a, momentum=0.0, **k)):
            model = Net()
            optimizer = make(model, 1.0, density=0.03, comm=comm)
            table = iter(rates)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, table=table: next(table, 0.0))
            for step in range(len(rates)):
                give_whole_grads(model, comm.rank, step)
                optimizer.step()
                scheduler.step()
            outcomes.append(values(model))
        assert same(*outcomes) == (len(set(rates)) == 1)

    run_ranks(3, run)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_nan_on_one_rank_skips_on_all(maker: str) -> None:
    def run(comm: Comm) -> list[Tensor]:
        model = Net()
        optimizer = MAKERS[maker](model, 0.05, density=0.05, rules=SPARSE, comm=comm)
        train(model, optimizer, comm.rank, range(2))
        before, pending = values(model), owed(optimizer)
        optimizer.zero_grad()
        backward(model, comm.rank, 2)
        if comm.rank == 1:
            model.first.bias.grad[3] = torch.nan
        optimizer.step()
        assert same(values(model), before)
        assert same(owed(optimizer), pending)
        stats = optimizer.sieve.stats
        assert (stats.steps, stats.skipped_steps) == (2, 1)
        assert stats.last is not None
        assert not stats.last.counted
        train(model, optimizer, comm.rank, range(3, 5))
        assert not same(values(model), before)
        return values(model)

    results = run_ranks(3, run)
    assert all(same(results[0], result) for result in results)
    assert all(torch.isfinite(value).all() for value in results[0])


@pytest.mark.parametrize("maker", MAKERS)
def test_resumed_equals_uninterrupted(maker: str) -> None:
    def made(model: nn.Module, comm: Comm) -> tuple[Any, Any]:
        optimizer = MAKERS[maker](model, 0.05, density=0.05, rules=SPARSE, comm=comm, start="trust")
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def go_on(model: nn.Module, optimizer: Any, scheduler: Any, rank: int, steps: range) -> None:
        for step in steps:
            train(model, optimizer, rank, range(step, step + 1))
            scheduler.step()

    def run(comm: Comm) -> None:
        model = Net()
        optimizer, scheduler = made(model, comm)
        go_on(model, optimizer, scheduler, comm.rank, range(4))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (model, optimizer, scheduler)], file)
        go_on(model, optimizer, scheduler, comm.rank, range(4, 8))
        resumed = Net()
        parts = (resumed, *made(resumed, comm))
        file.seek(0)
        for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        go_on(*parts, comm.rank, range(4, 8))
        assert same(values(resumed), values(model))
        assert same(owed(parts[1]), owed(optimizer))
        assert parts[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.0125

    run_ranks(3, run)


def test_replicas_begin_as_rank_0_or_are_compared() -> None:
    def shifted(comm: Comm) -> Net:
        model = Net()
        with torch.no_grad():
            model.second.weight[3, 4] += comm.rank == 2
        return model

    def run(comm: Comm) -> None:
        model = shifted(comm)
        optimizer = wrapped(model, 0.1, density=0.1, comm=comm)
        assert same(values(model), values(Net()))
        assert optimizer.sieve.stats.traffic.bytes_sent == 0  # the start is not part of any step
        with pytest.raises(MismatchError, match=r"rank 2 has parameters \(digest\) .* ranks 0, 1, 3, 4 have"):
            wrapped(shifted(comm), 0.1, density=0.1, comm=comm, start="check")
        wrapped(Net(), 0.1, density=0.1, comm=comm, start="check")
        model = shifted(comm)
        wrapped(model, 0.1, density=0.1, comm=comm, start="trust")
        assert same(values(model), values(Net())) == (comm.rank != 2)
        with pytest.raises(MismatchError, match="rank 1 has density 0.2"):
            wrapped(Net(), 0.1, density=0.2 if comm.rank == 1 else 0.1, comm=comm)

    run_ranks(5, run)


def test_closures_are_called_once_and_their_loss_comes_back() -> None:
    def run(comm: Comm) -> None:
        for make in MAKERS.values():
            outcomes = []
            for with_closure in (False, True):
                model = Net()
                optimizer = make(model, 0.05, density=0.05, comm=comm)
                losses: list[Tensor] = []

                def closure(model: Net = model, optimizer: Any = optimizer, losses: list[Tensor] = losses) -> Tensor:
                    optimizer.zero_grad()
                    losses.append(backward(model, comm.rank, len(losses)))
                    return losses[-1]

                for _ in range(3):
                    if with_closure:
                        assert optimizer.step(closure) is losses[-1]
                    else:
                        closure()
                        assert optimizer.step() is None
                outcomes.append([*values(model), *losses])
            assert same(*outcomes)

    run_ranks(2, run)


def test_a_grad_scaler_skips_on_all_ranks_and_lowers_its_scale_on_all() -> None:
    def run(comm: Comm) -> tuple[list[Tensor], float]:
        model, plain = Net(), Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = wrapped(model, 0.125, density=0.05, scaler=scaler, comm=comm)
        unscaled = wrapped(plain, 0.125, density=0.05, comm=comm)
        for step in range(5):
            optimizer.zero_grad()
            scale = scaler.get_scale()
            scaler.scale(torch.zeros(()))  # as for the loss; the gradients themselves are given
            give_whole_grads(model, comm.rank, step)
            for parameter in model.parameters():
                parameter.grad *= scale
            if step == 2 and comm.rank == 0:
                model.second.weight.grad[0, 0] = torch.inf
            optimizer.exchange()
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                give_whole_grads(plain, comm.rank, step)
                unscaled.step()
            assert same(values(model), values(plain))
        assert optimizer.sieve.stats.skipped_steps == 1
        backward(model, comm.rank, 9)
        with pytest.raises(InputError, match=r"call optimizer.exchange\(\) after backward"):
            scaler.step(optimizer)
        return values(model), scaler.get_scale()

    results = run_ranks(3, run)
    assert all(same(results[0][0], result[0]) for result in results)
    assert {result[1] for result in results} == {2.0**11}  # up after two steps, down at the third, up after two more


def test_gradients_that_do_not_lie_in_order_and_gradients_that_are_missing() -> None:
    def run(comm: Comm) -> None:
        outcomes = []
        for permuted in (False, True):
            model = nn.Conv2d(8, 16, 3)
            with torch.no_grad():
                model.weight.copy_(torch.arange(model.weight.numel()).view_as(model.weight) / 1024)
            optimizer = wrapped(model, 0.5, density=0.1, rules=Rules(min_numel=100), comm=comm)
            for step in range(3):
                give_whole_grads(model, comm.rank, step)
                assert model.weight.grad is not None
                if permuted:
                    model.weight.grad = model.weight.grad.to(memory_format=torch.channels_last)
                    assert not model.weight.grad.is_contiguous()
                model.bias.grad = None if comm.rank else torch.ones(16)
                optimizer.step()
                assert torch.equal(model.bias.grad, torch.full((16,), 1 / comm.size))
            outcomes.append([model.weight.detach().contiguous(), model.weight.grad.contiguous(), *owed(optimizer)])
        assert same(*outcomes)

    run_ranks(2, run)


def test_what_cannot_be_exchanged_is_refused() -> None:
    def run(comm: Comm) -> None:
        model = Net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
        with pytest.raises(InputError, match="all names begin with 'module.'.*gradsieve.attach"):
            DistributedOptimizer(sgd, pairs, density=0.1, comm=comm)
        with pytest.raises(InputError, match=r"2 of the optimizer's parameters have no name.*\(50, 60\)"):
            DistributedOptimizer(sgd, model.first, density=0.1, comm=comm)
        with pytest.raises(InputError, match="parameters must be a model, or pairs"):
            DistributedOptimizer(sgd, model.parameters(), density=0.1, comm=comm)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="some names occur twice"):
            OkTopkSGD([("a", model.first.weight), ("a", model.first.bias)], 0.1, density=0.1, comm=comm)
        with pytest.raises(InputError, match="must be a torch.optim.Optimizer, got Net"):
            DistributedOptimizer(model, model, density=0.1, comm=comm)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="LBFGS evaluates the model several times per step"):
            DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, density=0.1, comm=comm)
        with pytest.raises(InputError, match="holds the momentum itself.*momentum=0"):
            wrapped(model, 0.1, recipe="dgc", density=0.1, comm=comm)
        with pytest.raises(InputError, match="start must be one of broadcast, check, trust, got 'copy'"):
            wrapped(model, 0.1, density=0.1, comm=comm, start="copy")
        with pytest.raises(TypeError, match="unknown options \\['groups_mb'\\]"):
            wrapped(model, 0.1, density=0.1, comm=comm, groups_mb=3)
        with pytest.raises(InputError, match="lr must not be negative, got -1"):
            OkTopkSGD(model, -1, density=0.1, comm=comm)
        optimizer = wrapped(model, 0.1, density=0.1, comm=comm)
        with pytest.raises(InputError, match="wrap it once only"):
            DistributedOptimizer(optimizer, model, density=0.1, comm=comm)
        with pytest.raises(InputError, match="parameters cannot be added any more"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(InputError, match="the state has no residuals.*before wrapping it"):
            optimizer.load_state_dict(sgd.state_dict())
        state = optimizer.state_dict()
        (own,) = state["gradsieve"].values()
        state["gradsieve"] = {f"rank {1 - comm.rank} of 2": own}
        with pytest.raises(InputError, match="or the residuals of other ranks are lost"):
            optimizer.load_state_dict(state)
        embedding = nn.Embedding(50, 40, sparse=True)
        embedding(torch.tensor([3])).sum().backward()
        with pytest.raises(InputError, match="parameter weight has a sparse gradient.*sparse=False"):
            OkTopkSGD(embedding, 0.1, density=0.1, comm=comm).step()

    run_ranks(2, run)


def gloo_job(process: RankProcess) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(process.rank)
    model = nn.Linear(64, 64)  # different on every rank
    optimizer = gradsieve.OkTopkSGD(model, 0.1, density=0.05, timeout_seconds=30)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + process.rank))
        model(x).square().mean().backward()
        optimizer.step()
    flat = torch.cat([value.reshape(-1) for value in values(model)])
    gathered = [torch.empty_like(flat) for _ in range(process.size)]
    torch.distributed.all_gather(gathered, flat)
    assert all(torch.equal(flat, other) for other in gathered)
    with pytest.raises(InputError, match="the model is wrapped already.*gradsieve.attach"):
        OkTopkSGD(DistributedDataParallel(nn.Linear(64, 64)), 0.1, density=0.05)


def test_over_a_process_group() -> None:
    run_rank_processes(2, gloo_job)
