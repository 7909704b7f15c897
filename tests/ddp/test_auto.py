"""`recipe="auto"` under DDP, on real processes. Times are made up where a test needs a certain decision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve.auto.chooser import SETTLING_STEPS, TIMED_STEPS
from gradsieve.errors import MismatchError
from support.ddp_models import Whole, attached, digest, loss_of, parameters_digest, same_everywhere, train, whole_grads
from support.decisions import DENSE_LOSES, DENSE_WINS, chosen, scripted
from support.rank_pool import on_ranks
from support.updates_models import Lion, started, sum_of_local_models

TRIAL_STEPS = SETTLING_STEPS + TIMED_STEPS


def train_whole(model: Any, steps: range, rank: int, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(whole_grads(model.module, 10 * step + rank)).backward()
        optimizer.step()


def of_updates(make: Any = None, net: Any = None, **settings: Any) -> Any:
    return started("auto", 0.5, net=net, make=make, **settings)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=4.0)


@on_ranks(4)
def test_gradients_are_all_delivered_when_dense_is_chosen(rank: int) -> None:
    """On whole numbers, what a run has learned is then that of plain DDP, bit for bit."""
    plain = DistributedDataParallel(Whole())
    model, sieve, _ = attached("auto", 0.05, model=Whole())
    scripted(sieve, DENSE_WINS)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    steps = range(3 * TRIAL_STEPS + 5)
    train_whole(plain, steps, rank, torch.optim.SGD(plain.parameters(), lr=4.0))
    train_whole(model, steps, rank, optimizer)
    assert chosen(sieve) == "dense"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert sieve.stats.steps == len(steps)
    assert sieve.stats.dense_steps == len(steps) - 2 * TRIAL_STEPS
    sieve.close()


@on_ranks(4)
def test_residuals_stay_when_the_recipe_changes(rank: int) -> None:
    """Parameters and residuals together hold every gradient at each step, on whole numbers exactly."""
    plain = DistributedDataParallel(Whole())
    model, sieve, _ = attached("auto", 0.05, model=Whole())
    times = scripted(sieve, DENSE_WINS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=4.0) for each in (plain, model)]
    for step in range(90):
        times.update(DENSE_WINS if step < 40 else DENSE_LOSES)
        train_whole(plain, range(step, step + 1), rank, optimizers[0])
        train_whole(model, range(step, step + 1), rank, optimizers[1])
        for name, parameter in model.module.named_parameters():
            index, number = sieve.engine.positions[name]
            residuals = sieve.engine.vectors(index)
            slot = sieve.engine.groups[index].slots[number]
            residual = residuals["residual"][slot.start : slot.stop].clone() if residuals else torch.zeros(1)
            dist.all_reduce(residual)
            expected = plain.module.get_parameter(name).flatten()
            assert torch.equal(parameter.flatten() - residual.expand_as(expected), expected), (step, name)
    assert chosen(sieve) == "oktopk"
    sieve.close()


@on_ranks(4)
def test_updates_are_all_delivered_when_dense_is_chosen(rank: int) -> None:
    plain = DistributedDataParallel(Whole())
    model, sieve, optimizer = of_updates(sgd, Whole())
    scripted(sieve, DENSE_WINS)
    steps = range(2 * TRIAL_STEPS + 5)
    train_whole(plain, steps, rank, sgd(plain.parameters()))
    train_whole(model, steps, rank, optimizer)
    sieve.exchange()
    assert chosen(sieve) == "dense"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-2)  # one bit rounds, so exact to float32's precision only
    sieve.close()


@on_ranks(4)
def test_local_models_move_by_the_mean_of_all_updates_through_every_change(rank: int) -> None:
    plain = DistributedDataParallel(Whole())
    model, sieve, optimizer = of_updates(sgd, Whole())
    times = scripted(sieve, DENSE_WINS)
    theirs = sgd(plain.parameters())
    for step in range(90):
        times.update(DENSE_WINS if step < 40 else DENSE_LOSES)
        train_whole(plain, range(step, step + 1), rank, theirs)
        train_whole(model, range(step, step + 1), rank, optimizer)
    sieve.exchange()
    assert chosen(sieve) == "onebit"
    assert sieve.stats.steps == 90
    for name, total in sum_of_local_models(sieve).items():
        # One bit rounds, so the sum is exact to float32's precision only.
        assert torch.allclose(total / 4, plain.module.get_parameter(name).flatten().double(), atol=1e-2), name
    sieve.close()


@on_ranks(4)
def test_dense_steps_are_those_of_ddp_and_torchs_adamw(rank: int) -> None:
    """From the change on, with the averaged state. Gloo adds in another order if buckets differ, hence tolerances."""
    model, sieve, optimizer = of_updates()
    scripted(sieve, DENSE_WINS)
    train(model, range(TRIAL_STEPS), rank, optimizer)
    loss_of(model, rank, TRIAL_STEPS)  # the forward pass that changes
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
        getattr(plain.module, hooks).clear()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(TRIAL_STEPS, TRIAL_STEPS + 6):
        for each, stepped in ((plain, theirs), (model, optimizer)):
            stepped.zero_grad()
            loss_of(each, rank, step).backward()
            stepped.step()
        for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, other.grad, rtol=1e-5, atol=1e-7)
            assert torch.allclose(ours, other, rtol=1e-5, atol=1e-5)
    for name, shared in sieve.shared_parameters().items():
        assert torch.equal(shared, model.module.get_parameter(name).flatten())
    assert sieve.clip_factor == 1.0
    assert same_everywhere(digest([tensor for state in optimizer.state.values() for tensor in tensors(state)]))
    sieve.close()


def tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


@on_ranks(4)
def test_optimizer_states_are_averaged(rank: int) -> None:
    """First moments exactly; second moments are multiplied by the share that the mean gradient has of them."""
    model, sieve, optimizer = of_updates()
    scripted(sieve, DENSE_WINS)
    train(model, range(TRIAL_STEPS), rank, optimizer)
    before = {name: copy.deepcopy(optimizer.state[p]) for name, p in model.module.named_parameters()}
    loss_of(model, rank, TRIAL_STEPS)
    for name, parameter in model.module.named_parameters():
        first, second = before[name]["exp_avg"], before[name]["exp_avg_sq"]
        for tensor in (first, second):
            dist.all_reduce(tensor.div_(4))
        share = optimizer.share_of_mean(parameter, 4)
        assert 0.25 <= share < 1
        assert torch.allclose(optimizer.state[parameter]["exp_avg"], first, atol=1e-7)
        assert torch.allclose(optimizer.state[parameter]["exp_avg_sq"], share * second, rtol=1e-5)
        assert optimizer.state[parameter]["step"] == before[name]["step"]
    sieve.close()


@on_ranks(4)
def test_it_changes_back_and_forth_with_equal_replicas(rank: int) -> None:
    for make in (None, Lion, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)):
        model, sieve, optimizer = of_updates(make, check_replicas_every=1)
        times = scripted(sieve, DENSE_WINS)
        train(model, range(40), rank, optimizer)
        assert chosen(sieve) == "dense"
        times.update(DENSE_LOSES)
        train(model, range(40, 80), rank, optimizer)
        assert chosen(sieve) == "onebit"
        times.update(DENSE_WINS | {"onebit": 9.0})
        train(model, range(80, 120), rank, optimizer)
        assert chosen(sieve) == "dense"
        sieve.exchange()
        assert same_everywhere(parameters_digest(model))
        assert sieve.stats.steps == 120
        sieve.close()


@on_ranks(2)
def test_a_resumed_run_continues_alike(rank: int) -> None:
    for make in (of_updates, of_gradients):
        for steps in (TRIAL_STEPS // 2, TRIAL_STEPS + 3, 3 * TRIAL_STEPS + 2):
            model, sieve, optimizer = make()
            scripted(sieve, DENSE_WINS)
            train(model, range(steps), rank, optimizer)
            saved = copy.deepcopy((sieve.state_dict(), model.module.state_dict(), optimizer.state_dict()))
            train(model, range(steps, steps + 40), rank, optimizer)
            sieve.exchange()
            other, resumed, stepped = make()
            other.module.load_state_dict(saved[1])
            stepped.load_state_dict(saved[2])
            resumed.load_state_dict(saved[0])
            scripted(resumed, DENSE_WINS)
            train(other, range(steps, steps + 40), rank, stepped)
            resumed.exchange()
            assert chosen(resumed) == chosen(sieve) == "dense"
            assert parameters_digest(other) == parameters_digest(model), (make.__name__, steps)
            sieve.close()
            resumed.close()


def of_gradients(**settings: Any) -> Any:
    return attached("auto", 0.05, **settings)


@on_ranks(4)
def test_ranks_whose_inputs_end_sooner(rank: int) -> None:
    """The others go on, in the same way on all ranks, through trials and dense steps."""
    for make in (of_updates, of_gradients):
        model, sieve, optimizer = make()
        scripted(sieve, DENSE_WINS)
        with model.join():
            train(model, range(10 + 12 * rank), rank, optimizer)
        assert chosen(sieve) == "dense", make.__name__
        assert sieve.stats.steps >= 46 - 1
        sieve.close()


@on_ranks(2)
def test_what_is_measured_decides(rank: int) -> None:
    """Nothing is made up here: some decision, the same on both ranks, with its reason."""
    for make in (of_updates, of_gradients):
        model, sieve, optimizer = make(check_replicas_every=5)
        train(model, range(60), rank, optimizer)
        sieve.exchange()
        assert sieve.engine.decision is not None
        name = chosen(sieve)
        assert name is not None
        assert same_everywhere(name)
        assert sieve.stats.decided is not None
        assert sieve.stats.decided.name == name
        assert sieve.stats.decided.seconds_per_step[name] > 0
        assert f"decided: {name} (" in repr(sieve)
        assert same_everywhere(parameters_digest(model))
        sieve.close()


class Quantized(Lion):
    """A state of integers, as in optimizers with 8 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["levels"] = (state["moment"] * 100).to(torch.int8)


@on_ranks(2)
def test_states_that_cannot_be_averaged_keep_it_sparse(rank: int) -> None:
    model, sieve, optimizer = of_updates(Quantized)
    scripted(sieve, DENSE_WINS)
    train(model, range(60), rank, optimizer)
    assert chosen(sieve) == "onebit"
    sieve.exchange()
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(2)
def test_all_ranks_must_choose_or_none(rank: int) -> None:
    with pytest.raises(MismatchError, match="automatic choice"):
        started("auto" if rank else "onebit", 0.5)


@on_ranks(2)
def test_local_steps_leave_nothing_to_choose(rank: int) -> None:
    model, sieve, optimizer = of_updates(local_steps=4)
    assert sieve.engine.decision is None
    train(model, range(8), rank, optimizer)
    sieve.close()


@on_ranks(2)
def test_a_dense_phase_of_the_users_is_not_measured(rank: int) -> None:
    for make in (of_updates, of_gradients):
        model, sieve, optimizer = make()
        scripted(sieve, DENSE_WINS)
        sieve.dense(steps=30)
        train(model, range(30), rank, optimizer)
        sieve.exchange()
        assert chosen(sieve) is None
        assert sieve.stats.dense_steps == 30
        train(model, range(30, 70), rank, optimizer)
        assert chosen(sieve) == "dense"
        sieve.close()


@on_ranks(2)
def test_an_overflow_of_one_rank_skips_the_step_of_all_while_dense(rank: int) -> None:
    model, sieve, optimizer = of_updates()
    scripted(sieve, DENSE_WINS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step) * (float("inf") if (step, rank) == (30, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert chosen(sieve) == "dense"
    assert scaler.get_scale() == 128.0
    assert same_everywhere(parameters_digest(model))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    sieve.close()
