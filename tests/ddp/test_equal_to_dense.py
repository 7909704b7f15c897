"""DDP in two lines, on real processes: what equals dense DDP, and that replicas and layouts stay equal."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import RECIPES
from gradsieve.recipes import recipe as named_recipe
from support.ddp_models import (
    Net,
    Whole,
    attached,
    digest,
    loss_of,
    parameters_digest,
    same_everywhere,
    state_tensors,
    train,
    whole_grads,
)
from support.rank_pool import on_ranks

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1000},
    {"static_graph": True, "bucket_cap_mb": 0.01},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.03},
]


@on_ranks(4)
def test_density_one_is_dense_ddp(rank: int) -> None:
    plain = DistributedDataParallel(Net())
    train(plain, range(4), rank, torch.optim.SGD(plain.parameters(), lr=0.1))
    for recipe in RECIPES:
        model, sieve, optimizer = attached(named_recipe(recipe, values="exact"), 1.0)
        train(model, range(4), rank, optimizer)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), recipe
        sieve.close()


@on_ranks(4)
def test_density_one_is_dense_ddp_bit_for_bit_on_whole_numbers(rank: int) -> None:
    plain = DistributedDataParallel(Whole())
    for recipe in RECIPES:
        model, sieve, _ = attached(named_recipe(recipe, values="exact"), 1.0, model=Whole())
        for step in range(3):
            for each in (plain, model):
                each.zero_grad()
                each(whole_grads(each.module, 10 * step + rank)).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), recipe
        sieve.close()


def check_replicas(rank: int, steps: int) -> None:
    for recipe in RECIPES:
        model, sieve, optimizer = attached(recipe, 0.02)
        train(model, range(steps), rank, optimizer)
        assert same_everywhere(parameters_digest(model)), recipe
        assert sieve.stats.steps == steps
        assert sieve.stats.selected_entries > 0
        sieve.close()


@on_ranks(4)
def test_replicas_stay_equal(rank: int) -> None:
    check_replicas(rank, steps=8)


@pytest.mark.long
@pytest.mark.timeout(1800)
@on_ranks(4)
def test_replicas_stay_equal_for_200_steps(rank: int) -> None:
    check_replicas(rank, steps=200)


@on_ranks(4)
def test_drift_is_found(rank: int) -> None:
    """The smallest difference there is, in one weight of one rank."""
    model, sieve, optimizer = attached("oktopk", check_replicas_every=3)
    train(model, range(4), rank, optimizer)
    with torch.no_grad():
        if rank == 2:
            weight = model.module.third.weight
            weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0))
    train(model, range(4, 6), rank, optimizer)  # steps 4 and 5 do not look
    owed = digest(state_tensors(sieve))
    with pytest.raises(
        gradsieve.ReplicaError,
        match=rf"^rank {rank}: .* rank 2 differs from ranks 0, 1, 3; parameter third.weight is the first of 1 ",
    ) as info:
        train(model, range(6, 7), rank, optimizer)
    assert (info.value.ranks, info.value.parameter) == ((2,), "third.weight")
    assert digest(state_tensors(sieve)) == owed
    sieve.close()


@on_ranks(4)
def test_replicas_that_are_equal_raise_no_alarm(rank: int) -> None:
    for dtypes in ((torch.float32,) * 3, (torch.bfloat16, torch.float64, torch.float16)):
        model, sieve, optimizer = attached(model=Net(dtypes), check_replicas_every=1)
        before = sieve.stats.traffic.calls
        train(model, range(5), rank, optimizer)
        assert sieve.stats.traffic.calls >= before + 5
        assert sieve.stats.steps == 5
        sieve.close()
    # A rank whose inputs have ended keeps its parameters: that is no drift.
    model, sieve, optimizer = attached(check_replicas_every=1)
    with model.join():
        train(model, range(3 + rank), rank, optimizer)
    assert sieve.stats.steps == 6
    train(model, range(6, 8), rank, optimizer)
    sieve.close()


@on_ranks(4)
def test_layouts_give_the_same_bits(rank: int) -> None:
    for recipe in ("oktopk", "dgc"):
        seen = {}
        for number, layout in enumerate(LAYOUTS):
            model, sieve, optimizer = attached(recipe, ddp=layout, local_clip_norm=0.5)
            train(model, range(5), rank, optimizer)
            seen[number] = (parameters_digest(model), digest(state_tensors(sieve)))
            sieve.close()
        assert len(set(seen.values())) == 1, (recipe, seen)


@on_ranks(4)
def test_mixed_dtypes(rank: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    seen = set()
    for layout in ({}, {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}):
        model, sieve, optimizer = attached(model=Net(dtypes), ddp=layout)
        train(model, range(4), rank, optimizer)
        assert {group.dtype for group in sieve.engine.groups} == set(dtypes)
        assert same_everywhere(parameters_digest(model))
        seen.add((parameters_digest(model), digest(state_tensors(sieve))))
        sieve.close()
    assert len(seen) == 1


@on_ranks(4)
def test_bfloat16_models(rank: int) -> None:
    model, sieve, optimizer = attached(model=Net((torch.bfloat16,) * 3))
    before = loss_of(model, 0, 0).item()
    train(model, range(10), rank, optimizer)
    assert same_everywhere(parameters_digest(model))
    assert loss_of(model, 0, 0).item() < before
    assert all(vector.dtype == torch.float32 for vector in state_tensors(sieve))
    sieve.close()


@on_ranks(4)
def test_exchange_overlaps_backward(rank: int) -> None:
    """Backward is held up at the first layer until the last layer's group has been exchanged."""
    model, sieve, optimizer = attached(ddp={"bucket_cap_mb": 0.005})
    train(model, range(2), rank, optimizer)  # from the second step on there are several buckets
    exchanged = threading.Event()
    exchange = sieve.engine.exchange

    def watched(*arguments: Any) -> Any:
        outcome = exchange(*arguments)
        exchanged.set()
        return outcome

    sieve.engine.exchange = watched
    seen = []
    handle = model.module.first.weight.register_hook(lambda grad: seen.append(exchanged.wait(60)))
    train(model, range(2, 3), rank, optimizer)
    handle.remove()
    assert seen == [True]
    sieve.close()


@on_ranks(4)
def test_groups_known_to_some_ranks_only(rank: int) -> None:
    """Ranks that know different numbers of process groups must still find each other."""
    dist.new_group([0], use_local_synchronization=True)
    model, sieve, optimizer = attached()
    train(model, range(2), rank, optimizer)
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_subgroups_and_two_models(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    model, sieve, optimizer = attached("oktopk", ddp={"process_group": mine})
    other, second, other_optimizer = attached("gtopk", 0.1, ddp={"bucket_cap_mb": 0.01})
    for step in range(4):
        train(model, range(step, step + 1), rank, optimizer)
        train(other, range(step, step + 1), rank, other_optimizer)
    both = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()])] * 2)
    dist.all_reduce(both[1], group=mine)
    assert torch.equal(both[1], both[0] * 2)
    assert not same_everywhere(parameters_digest(model))  # the halves saw different data
    assert same_everywhere(parameters_digest(other))
    assert (sieve.engine.comm.size, second.engine.comm.size) == (2, 4)
    # One loss through both: their buckets come interleaved.
    (loss_of(model, rank, 9) + loss_of(other, rank, 9)).backward()
    assert same_everywhere(digest(p.grad for p in other.parameters()))
    sieve.close()
    second.close()
