"""DDP in two lines, on real processes: what training runs do besides plain steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsieve
from gradsieve import RECIPES, Rules, Sieve
from support.ddp_models import (
    Net,
    Whole,
    attached,
    digest,
    loss_of,
    own_state,
    parameters_digest,
    pending,
    same_everywhere,
    state_tensors,
    train,
    whole_grads,
)
from support.rank_pool import on_ranks


@on_ranks(4)
def test_nan_skips_everywhere(rank: int) -> None:
    for recipe in RECIPES:
        for culprit in ("first.weight", "third.bias"):  # sent sparsely in the last group, sent densely
            model, sieve, optimizer = attached(recipe)
            train(model, range(2), rank, optimizer)
            before = [tensor.clone() for tensor in state_tensors(sieve)]
            others = str([(s.selector, s.reducer) for s in sieve.engine.states])
            handle = dict(model.module.named_parameters())[culprit].register_hook(
                lambda grad: grad.clone().index_fill_(0, torch.tensor([3]), torch.nan) if rank == 1 else grad
            )
            optimizer.zero_grad()
            loss_of(model, rank, 2).backward()
            handle.remove()
            assert not all(torch.isfinite(p.grad).all() for p in model.parameters()), (recipe, culprit)
            after = state_tensors(sieve)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (recipe, culprit)
            assert others == str([(s.selector, s.reducer) for s in sieve.engine.states])
            assert (sieve.stats.steps, sieve.stats.skipped_steps) == (2, 1)
            train(model, range(2, 4), rank, optimizer)
            assert same_everywhere(parameters_digest(model))
            assert all(torch.isfinite(p).all() for p in model.parameters())
            sieve.close()


@on_ranks(4)
def test_grad_scaler(rank: int) -> None:
    """An overflow on one rank is skipped by all; the halved scale halves what is owed; so does it double."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    model, sieve, optimizer = attached("oktopk", scaler=scaler)
    scales = []
    for step in range(9):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        owed = [tensor.clone() for tensor in state_tensors(sieve)]
        factor = scaler.get_scale() / (sieve.engine.loss_scale or scaler.get_scale())
        scaler.scale(loss * (torch.inf if step == 2 and rank == 3 else 1.0)).backward()
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(owed, state_tensors(sieve), strict=True))
        scales.append((scaler.get_scale(), factor))
        scaler.step(optimizer)
        scaler.update()
    assert [factor for _, factor in scales] == [1, 1, 1, 0.5, 1, 1, 1, 2, 1]
    assert sieve.stats.skipped_steps == 1
    assert same_everywhere(parameters_digest(model))
    unscaled, other, plain = attached("oktopk")
    for step in (0, 1, 3, 4, 5, 6, 7, 8):
        plain.zero_grad()
        loss_of(unscaled, rank, step).backward()
        plain.step()
    # Scales are powers of two: with what is owed rescaled, every bit is as without them.
    assert parameters_digest(unscaled) == parameters_digest(model)
    sieve.close()
    other.close()


@on_ranks(4)
def test_no_sync_accumulates(rank: int) -> None:
    ours, sieve, _ = attached("topka", 0.1, model=Whole())
    theirs, other, _ = attached("topka", 0.1, model=Whole())
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        first, second = (whole_grads(ours.module, 100 * step + 10 * part + rank) for part in range(2))
        with ours.no_sync():
            ours(first).backward()
        ours(second).backward()
        theirs({name: first[name] + second[name] for name in first}).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert sieve.stats.steps == 4
    assert digest(state_tensors(sieve)) == digest(state_tensors(other))
    sieve.close()
    other.close()


class Ledger:
    """Whole numbers in, whole numbers out: the law over many steps, for the sparse parameters of a model."""

    def __init__(self, model: Any, sieve: Sieve) -> None:
        self.model, self.sieve = model, sieve
        self.given = {n: torch.zeros(p.numel()).double() for n, p in model.module.named_parameters()}
        self.delivered = {n: torch.zeros(p.numel()).double() for n, p in model.module.named_parameters()}

    def step(self, grads: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(grads).backward()
        for name, grad in grads.items():
            self.given[name] += grad.flatten().double()
        for name, parameter in self.model.module.named_parameters():
            if parameter.grad is not None:
                self.delivered[name] += parameter.grad.flatten().double() * dist.get_world_size()

    def check(self, witness: int) -> None:
        """`witness`: a rank that has seen all steps."""
        for name, owed in pending(self.sieve).items():
            dist.all_reduce(self.given[name])
            dist.broadcast(self.delivered[name], witness)
            assert self.delivered[name].any()
            assert torch.equal(self.given[name], self.delivered[name] + owed), name


@on_ranks(4)
def test_uneven_inputs_with_join(rank: int) -> None:
    for layout in ({}, {"bucket_cap_mb": 0.01}, {"find_unused_parameters": True}):
        model, sieve, _ = attached("topkdsa", 0.05, model=Whole(torch.float64), ddp=layout)
        ledger = Ledger(model, sieve)
        with model.join():
            for step in range(3 + rank):
                ledger.step(whole_grads(model.module, 10 * step + rank))
        last = dist.get_world_size() - 1
        assert sieve.stats.steps == 3 + last
        assert sieve.stats.joined_steps == last - rank
        ledger.check(witness=last)
        sieve.close()


@on_ranks(4)
def test_join_with_a_scaler_keeps_what_it_cannot_scale(rank: int) -> None:
    """A joined rank does not know the others' scale: what it owes waits until it takes part again."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    model, sieve, optimizer = attached("topka", 0.05, model=Whole(), scaler=scaler)
    with model.join():
        for step in range(2 + 3 * (rank == 0)):
            scaler.scale(model(whole_grads(model.module, 10 * step + rank))).backward()
            owed = digest(state_tensors(sieve))
            scaler.step(optimizer)
            scaler.update()
    assert digest(state_tensors(sieve)) == owed
    assert sieve.stats.joined_steps == (0 if rank == 0 else 3)
    sieve.close()


@on_ranks(4)
def test_unused_parameters_lose_nothing(rank: int) -> None:
    for recipe in ("topka", "oktopk"):
        for layout in ({"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}):
            layout = {**layout, "find_unused_parameters": True}
            model, sieve, _ = attached(recipe, 0.05, model=Whole(torch.float64), ddp=layout)
            ledger = Ledger(model, sieve)
            for step in range(6):
                grads = whole_grads(model.module, 10 * step + rank)
                if step in (2, 3) or (step == 4 and rank != 0):
                    del grads["two"]  # by nobody, then by rank 0 alone
                ledger.step(grads)
                assert (model.module.two.grad is None) == (step in (2, 3))
            ledger.check(witness=0)
            sieve.close()


@on_ranks(4)
def test_dense_for_a_while(rank: int) -> None:
    for recipe in ("oktopk", "dgc"):
        model, sieve, _ = attached(recipe, 0.02, model=Whole(torch.float64))
        ledger = Ledger(model, sieve)
        grads = [whole_grads(model.module, 10 * step + rank) for step in range(8)]
        ledger.step(grads[0])
        assert any(vector.any() for vector in state_tensors(sieve))
        sieve.dense(steps=2)
        assert "dense for now" in repr(sieve)
        ledger.step(grads[1])
        assert not any(vector.any() for vector in state_tensors(sieve))
        ledger.step(grads[2])
        assert sieve.stats.dense_steps == 2
        ledger.step(grads[3])
        with sieve.dense():
            ledger.step(grads[4])
            ledger.step(grads[5])
        sieve.dense()
        sieve.sparse()
        ledger.step(grads[6])
        assert sieve.stats.dense_steps == 4
        assert any(vector.any() for vector in state_tensors(sieve))
        if recipe != "dgc":  # momentum adds of its own
            ledger.check(witness=0)
        sieve.close()


@on_ranks(4)
def test_schedules_and_rules(rank: int) -> None:
    schedule = gradsieve.Steps((0.2, 0.01), every=2, dense_steps=1)
    rules = Rules(exclude=("second.*",), include=("head.weight",), density=(("third.weight", 0.5),))
    model, sieve, optimizer = attached("topka", schedule, rules=rules)
    kinds = {name: (group.sparse, group.density) for group in sieve.engine.groups for name in group.names}
    assert kinds["second.weight"] == kinds["first.bias"] == (False, None)
    assert kinds["head.weight"] == kinds["first.weight"] == (True, None)
    assert kinds["third.weight"] == (True, 0.5)
    counts = []
    for step in range(5):
        before = sieve.stats.selected_entries
        train(model, range(step, step + 1), rank, optimizer)
        counts.append(sieve.stats.selected_entries - before)
    own, rest, all_of_it = round(3072 * 0.5), {"first.weight": 4096, "head.weight": 192}, 3072 + 4096 + 192
    expected = [own + sum(max(1, round(n * d)) for n in rest.values()) for d in (0.2, 0.2, 0.01, 0.01)]
    assert counts == [all_of_it, *expected]
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_clipping(rank: int) -> None:
    model, sieve, _ = attached("oktopk")
    loss_of(model, rank, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert same_everywhere(digest([norm, *(p.grad for p in model.parameters())]))
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)
    sieve.close()
    # DGC's: this rank's own gradient, before it is added to what is owed; one group is the paper's form.
    limit = 0.01
    bare = Net()
    loss_of(bare, rank, 0).backward()
    names = ("first.weight", "second.weight", "third.weight")
    grads = {name: p.grad.flatten() for name, p in bare.named_parameters() if name in names}
    total = torch.cat(list(grads.values())).norm()
    assert total > limit
    model, sieve, _ = attached("topka", 0.01, local_clip_norm=limit, group_mb=None)
    loss_of(model, rank, 0).backward()
    factor = limit / dist.get_world_size() ** 0.5 / float(total)
    for name, vectors in own_state(sieve)["parameters"].items():
        if vectors:
            owed = vectors["residual"]
            kept = owed != 0
            assert int(kept.sum()) > 0.9 * owed.numel()
            assert torch.allclose(owed[kept], (grads[name] * factor)[kept], rtol=1e-3, atol=1e-9)
    sieve.close()


class Odd(nn.Module):
    """Channels-last convolutions, a frozen layer, tied weights, a checkpointed part, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv2d(8, 32, 3, padding=1)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(32, 80), nn.Tanh(), nn.Linear(80, 32))
        self.outer, self.tied = nn.Linear(32, 80), nn.Linear(32, 80, bias=False)
        self.tied.weight = self.outer.weight
        self.empty = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.convolution(x)).mean((2, 3)))
        x = checkpoint(self.inner, x, use_reentrant=True)
        return self.outer(x) * self.tied(x) + self.empty.sum()


@on_ranks(4)
def test_odd_models(rank: int) -> None:
    def grads_of(model: nn.Module) -> list[Tensor]:
        inputs = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(rank))
        model(inputs.contiguous(memory_format=torch.channels_last)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    plain = grads_of(DistributedDataParallel(Odd().to(memory_format=torch.channels_last)))
    for layout in ({}, {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True}):
        model, sieve, _ = attached("oktopk", 1.0, model=Odd().to(memory_format=torch.channels_last), ddp=layout)
        names = {name for group in sieve.engine.groups for name in group.names}
        assert not any(name.startswith(("frozen", "tied", "empty")) for name in names)
        assert len(names) == 8
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            for ours, theirs in zip(grads_of(model), plain, strict=True):
                assert ours.stride() == theirs.stride()
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert sieve.stats.steps == 3
        sieve.close()
