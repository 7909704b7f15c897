"""`Sieve.adapt` and `Sieve.clip_grad_norm_` under DDP, on two processes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from support.ddp_models import (
    Net,
    Whole,
    attached,
    digest,
    loss_of,
    parameters_digest,
    same_everywhere,
    train,
    whole_grads,
)
from support.rank_pool import on_ranks
from support.updates_models import Lion, started, sum_of_local_models

SGD_SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.5},
    {"momentum": 0.5, "weight_decay": 0.125},
    {"momentum": 0.5, "weight_decay": 0.125, "nesterov": True},
    {"momentum": 0.75, "dampening": 0.5, "maximize": True},
]


@on_ranks(2)
def test_momentum_sgd_is_linear(rank: int) -> None:
    """The mean of all local models is dense SGD's model, exactly: all numbers are dyadic, and few steps are taken."""
    for settings in SGD_SETTINGS:
        for make in (gradsieve.SGD, torch.optim.SGD):
            for recipe, density in (("topka", 0.02), ("oktopk", 0.05), ("dense", 1.0)):
                plain = DistributedDataParallel(Whole(torch.float64))
                dense = torch.optim.SGD(plain.parameters(), lr=0.25, **settings)
                model, sieve, optimizer = started(
                    recipe, density, Whole(torch.float64), lambda p, make=make, s=settings: make(p, lr=0.25, **s)
                )
                assert type(optimizer) is gradsieve.SGD
                for step in range(5):
                    for each, its_optimizer in ((plain, dense), (model, optimizer)):
                        its_optimizer.zero_grad()
                        each(whole_grads(each.module, 10 * step + rank)).backward()
                        its_optimizer.step()
                expected = dict(plain.module.named_parameters())
                for name, total in sum_of_local_models(sieve).items():
                    assert total.any()
                    mean = total / dist.get_world_size()
                    assert torch.equal(mean, expected[name].flatten()), (recipe, settings, name)
                sieve.close()


@on_ranks(2)
def test_dense_gradients_train_it_as_torchs(rank: int) -> None:
    """Everything dense: `gradsieve.SGD` under a sieve of gradients is torch's under plain DDP, bit for bit."""
    plain = DistributedDataParallel(Net())
    train(plain, range(4), rank, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    model, sieve, _ = attached("dense", 1.0)
    train(model, range(4), rank, gradsieve.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert parameters_digest(model) == parameters_digest(plain)
    sieve.close()


@on_ranks(2)
def test_a_live_optimizer_is_adapted(rank: int) -> None:
    """Adapted after some steps: state, groups and scheduler are kept, and what follows is the sieve-aware form's."""
    for make, form in (
        (torch.optim.AdamW, gradsieve.AdamW),
        (torch.optim.Adam, gradsieve.Adam),
        (torch.optim.SGD, gradsieve.SGD),
    ):
        ends = []
        for kind in (make, form):  # `form` is told of the ranks at the same step
            model, sieve, optimizer = started(make=lambda p, kind=kind: kind(p, lr=0.01), adapt=False)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            train(model, range(3), rank, optimizer)
            groups, state = optimizer.param_groups, optimizer.state
            assert type(optimizer) is kind
            assert sieve.adapt(optimizer) is optimizer
            assert sieve.adapt(optimizer) is optimizer  # again: harmless
            assert type(optimizer) is form
            assert optimizer.param_groups is groups
            assert optimizer.state is state
            assert sieve.optimizer is optimizer
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                train(model, range(3, 5), rank, optimizer)
                scheduler.step()
                train(model, range(5, 7), rank, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.005
            assert same_everywhere(parameters_digest(model))
            ends.append(digest(p - sieve.engine.residual(n) for n, p in sieve.shared_parameters().items()))
            sieve.close()
        assert ends[0] == ends[1], make
    model, sieve, optimizer = started(adapt=False)
    train(model, range(7), rank, optimizer)
    never = parameters_digest(model)
    sieve.close()
    model, sieve, optimizer = started(adapt=False)
    sieve.adapt(optimizer)
    train(model, range(7), rank, optimizer)
    assert parameters_digest(model) != never  # the second moments are corrected from the first step on
    sieve.close()


class Wrapper(torch.optim.Optimizer):
    """As frameworks make them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@on_ranks(2)
def test_a_wrapped_optimizer_is_adapted_inside(rank: int) -> None:
    model = DistributedDataParallel(Net())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapper = Wrapper(Wrapper(inner))
    sieve = gradsieve.attach(model, optimizer=wrapper, adapt=False)
    assert sieve.adapt(wrapper) is wrapper
    assert type(inner) is gradsieve.AdamW
    sieve.close()


@on_ranks(2)
def test_what_cannot_be_adapted_is_said(rank: int) -> None:
    model, sieve, optimizer = started(make=lambda p: Lion(p, lr=0.003))
    with pytest.warns(RuntimeWarning, match="^Lion has no sieve-aware form and is left as it is") as caught:
        assert sieve.adapt(optimizer) is optimizer
    assert len(caught) == 1
    assert type(optimizer) is Lion
    train(model, range(2), rank, optimizer)
    other = torch.optim.AdamW(model.parameters())
    for stranger in (other, "adam"):
        with pytest.raises(gradsieve.InputError, match=f"^rank {rank}: .* of another optimizer, and those of this"):
            sieve.adapt(stranger)
    assert type(other) is torch.optim.AdamW
    sieve.close()
    model, sieve, optimizer = attached()
    with pytest.raises(gradsieve.InputError, match=r"this sieve exchanges gradients, .*attach\(model, optimizer="):
        sieve.adapt(optimizer)
    assert type(optimizer) is torch.optim.SGD
    sieve.close()


@on_ranks(2)
def test_own_gradients_are_clipped_at_the_root_of_ranks(rank: int) -> None:
    """As torch clips at limit times sqrt(P), bit for bit; and each rank by the norm of its own gradient."""
    model, sieve, _ = started()
    own = 10.0 * loss_of(model, rank, 0)
    own.backward()
    before = [p.grad.clone() for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(before)
    assert not same_everywhere(str(norm.item()))
    size = dist.get_world_size()
    assert sieve.clip_factor == math.sqrt(size)
    for limit in (0.01, 0.5 * norm.item(), 0.9 * norm.item(), 2 * norm.item()):
        copies = [nn.Parameter(torch.zeros_like(grad)) for grad in before]
        for copy, parameter, grad in zip(copies, model.parameters(), before, strict=True):
            copy.grad, parameter.grad = grad.clone(), grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(copies, size**0.5 * limit)
        told = sieve.clip_grad_norm_(limit)
        assert torch.equal(told, expected)
        assert torch.equal(told, norm)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), copies, strict=True))
        clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert clipped.item() == pytest.approx(min(norm.item(), limit * math.sqrt(size)), rel=1e-4)
    sieve.close()


@on_ranks(2)
def test_mean_gradients_are_clipped_as_torch_does(rank: int) -> None:
    model, sieve, optimizer = attached("topka", 0.1)
    (10 * loss_of(model, rank, 0)).backward()
    assert sieve.clip_factor == 1.0
    norm = sieve.clip_grad_norm_(0.01)
    assert norm > 0.1
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)
    optimizer.step()
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(2)
def test_gradients_that_are_not_finite_are_left_to_torch(rank: int) -> None:
    """One rank overflows: it is told so or its gradient is ruined, as torch has it. The others clip as ever."""
    model, sieve, _ = started()
    loss_of(model, rank, 0).backward()
    if rank == 1:
        model.module.first.weight.grad[0, 0] = torch.inf
        with pytest.raises(RuntimeError, match="non-finite"):
            sieve.clip_grad_norm_(0.01, error_if_nonfinite=True)
    norm = sieve.clip_grad_norm_(0.01)
    assert norm.isinf() == (rank == 1)
    assert model.module.first.weight.grad.isnan().any() == (rank == 1)
    sieve.close()
    model, sieve, _ = started()
    loss_of(model, rank, 0).backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    assert sieve.clip_grad_norm_(1.0, norm_type=math.inf).item() == largest
    sieve.close()
