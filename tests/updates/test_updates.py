"""Exchange of updates under DDP, on real processes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
from support.updates_models import started, sum_of_local_models

CODES = ("bf16", "int4", "sign", "twobit")
CONSERVING = [name for name in RECIPES if name != "dgc"]  # which holds the momentum itself


@on_ranks(4)
def test_nothing_is_lost(rank: int) -> None:
    """The mean of all local models has moved by the mean of all updates: exactly, on whole numbers."""
    codes = [named_recipe(name, values=values) for name in ("oktopk", "topkdsa") for values in CODES]
    for recipe in [*CONSERVING, *codes]:
        exact = isinstance(recipe, str) and named_recipe(recipe).reducer.codec.values == "exact"
        model, sieve, optimizer = started(recipe, net=Whole(), make=lambda p: torch.optim.SGD(p, lr=4.0))
        moved = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in model.module.named_parameters()}
        for step in range(5):
            optimizer.zero_grad()
            model(whole_grads(model.module, 10 * step + rank)).backward()
            for name, parameter in model.module.named_parameters():
                moved[name] -= 4 * parameter.grad.flatten().double()
            optimizer.step()
        for name, total in sum_of_local_models(sieve).items():
            dist.all_reduce(moved[name])
            if exact:
                assert torch.equal(total, moved[name]), recipe
            else:  # rounded values are kept to float32's precision
                assert torch.allclose(total, moved[name], atol=1e-3), recipe
        assert sieve.stats.delivered_entries > 0
        sieve.close()


@on_ranks(4)
def test_models_at_rest_are_equal(rank: int) -> None:
    for recipe in CONSERVING:
        model, sieve, optimizer = started(recipe)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            # Local models differ as soon as there are undelivered updates.
            assert sieve.local.is_ahead
            assert step < 2 or recipe == "dense" or not same_everywhere(parameters_digest(model)), recipe
            loss.backward()
            optimizer.step()
            assert same_everywhere(parameters_digest(model)), recipe
        shared = sieve.shared_parameters()
        assert all(torch.equal(shared[name], p.flatten()) for name, p in model.module.named_parameters())
        sieve.close()


@on_ranks(4)
def test_evaluation_and_saving_see_the_shared_model(rank: int) -> None:
    model, sieve, optimizer = started()
    train(model, range(3), rank, optimizer)
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()  # the local model is ahead now
    assert not same_everywhere(parameters_digest(model))
    with torch.no_grad():
        model.module(torch.ones(2, 64))
    assert same_everywhere(parameters_digest(model))
    optimizer.step()
    loss_of(model, rank, 4).backward()
    saved = model.module.state_dict()
    assert same_everywhere(digest(saved.values()))
    optimizer.step()
    sieve.close()


@on_ranks(4)
def test_sgd_learns_as_plain_ddp_does(rank: int) -> None:
    """Everything sent after every step: the mean of the ranks' SGD steps is the SGD step of the mean gradient."""
    plain = DistributedDataParallel(Net())
    train(plain, range(30), rank, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5))
    model, sieve, optimizer = started("dense", 1.0, make=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5))
    train(model, range(30), rank, optimizer)
    dense = dict(plain.module.named_parameters())
    for name, total in sum_of_local_models(sieve).items():
        assert torch.allclose((total / dist.get_world_size()).float(), dense[name].flatten(), atol=1e-5), name
    sieve.close()


@on_ranks(4)
def test_adamw_on_exchanged_gradients_is_torchs(rank: int) -> None:
    """Bit for bit: nothing is corrected where gradients are means already."""
    digests = []
    for make in (torch.optim.AdamW, gradsieve.AdamW):
        model, sieve, _ = attached("dense", 1.0)
        train(model, range(20), rank, make(model.parameters(), lr=0.01))
        digests.append(parameters_digest(model))
        sieve.close()
    assert digests[0] == digests[1]


@on_ranks(4)
def test_a_scaler_may_skip_on_one_rank(rank: int) -> None:
    """The rank that overflows takes part in the next exchange with nothing new, and no rank waits for it."""
    model, sieve, optimizer = started()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (torch.inf if step == 2 and rank == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale() < 2.0**8) == (rank == 3)
    with torch.no_grad():
        model.module(torch.ones(1, 64))
    assert same_everywhere(parameters_digest(model))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert sieve.stats.steps == 4  # the last step is exchanged by the next forward pass
    sieve.exchange()
    sieve.exchange()  # nothing is left to do
    assert sieve.stats.steps == 5
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_accumulation_exchanges_once(rank: int) -> None:
    model, sieve, optimizer = started()
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 2 * step).backward()
        loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()
    assert sieve.stats.steps == 2
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_uneven_inputs_are_joined(rank: int) -> None:
    model, sieve, optimizer = started(check_replicas_every=0)
    with model.join():
        train(model, range(3 + rank), rank, optimizer)
    assert sieve.stats.steps == 5
    assert sieve.stats.joined_steps == 3 - rank
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_a_resumed_run_equals_the_uninterrupted_one(rank: int) -> None:
    for recipe in ("oktopk", "topkdsa", named_recipe("topkdsa", values="sign")):
        straight, sieve, optimizer = started(recipe)
        train(straight, range(6), rank, optimizer)
        half, saved_sieve, optimizer = started(recipe, ddp={"bucket_cap_mb": 0.02})
        train(half, range(3), rank, optimizer)
        model, kept = copy.deepcopy(half.module.state_dict()), copy.deepcopy(saved_sieve.state_dict())
        train(half, range(3, 5), rank, optimizer)
        saved_sieve.close()
        resumed, resumed_sieve, optimizer = started(recipe)
        resumed.module.load_state_dict(model)
        resumed_sieve.load_state_dict(kept)
        train(resumed, range(3, 6), rank, optimizer)
        assert parameters_digest(resumed) == parameters_digest(straight), recipe
        assert digest(state_tensors(resumed_sieve)) == digest(state_tensors(sieve)), recipe
        sieve.close()
        resumed_sieve.close()


@on_ranks(4)
def test_another_size_keeps_the_mean_model(rank: int) -> None:
    """The states of two ranks, loaded by four: the mean of the local models is what it was."""
    model, sieve, optimizer = started()
    train(model, range(4), rank, optimizer)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, next(iter(sieve.state_dict().values())))
    states = {f"rank {old} of 2": gathered[old] for old in range(2)}
    expected = {name: (gathered[0]["parameters"][name]["residual"] + gathered[1]["parameters"][name]["residual"]) / 2
                for name in gathered[0]["parameters"]}  # fmt: skip
    sieve.load_state_dict(states)
    for name, mean in expected.items():
        ours = sieve.engine.residual(name).clone()
        dist.all_reduce(ours)
        assert torch.allclose(ours / 4, mean, atol=1e-7), name
    loaded = sieve.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(loaded, gathered[rank % 2]["optimizer"]["state"][0]["exp_avg"])
    train(model, range(4, 6), rank, optimizer)
    assert same_everywhere(parameters_digest(model))
    sieve.close()


@on_ranks(4)
def test_a_model_that_is_not_finite_is_not_spread(rank: int) -> None:
    model, sieve, optimizer = started()
    train(model, range(2), rank, optimizer)
    before = digest(sieve.shared_parameters().values())
    if rank == 1:
        with torch.no_grad():
            sieve.engine.residual("first.weight")[3] = torch.nan
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    assert sieve.stats.skipped_steps == 1
    assert digest(sieve.shared_parameters().values()) == before
    sieve.close()


@on_ranks(4)
def test_half_precision_parameters_keep_small_moves(rank: int) -> None:
    """A shared model in bfloat16 would lose every move below its last bit."""
    dtypes = (torch.bfloat16,) * 3
    model, sieve, optimizer = started(net=Net(dtypes), make=lambda p: torch.optim.SGD(p, lr=1e-5))
    start = {name: shared.clone() for name, shared in sieve.shared_parameters().items()}
    train(model, range(6), rank, optimizer)
    assert {shared.dtype for shared in sieve.shared_parameters().values()} == {torch.float32}
    assert same_everywhere(parameters_digest(model))
    assert start.keys() == sieve.shared_parameters().keys()
    sieve.close()


@on_ranks(4)
def test_drift_of_the_shared_model_is_found(rank: int) -> None:
    model, sieve, optimizer = started()
    train(model, range(2), rank, optimizer)
    if rank == 2:
        with torch.no_grad():
            model.module.third.weight[5, 7] += 1.0  # at rest, so it becomes part of this rank's shared model
    with pytest.raises(gradsieve.ReplicaError, match="rank 2 differs"):
        train(model, range(2, 3), rank, optimizer)
    sieve.close()


@on_ranks(4)
def test_diloco_averages_every_so_many_steps(rank: int) -> None:
    """Dense, every second step, Nesterov: as computed by hand from the ranks' own gradients."""
    outer = gradsieve.Outer(local_steps=2, rate=0.5, momentum=0.25)
    model, sieve, optimizer = started(
        "dense", 1.0, net=Whole(torch.float64), make=lambda p: torch.optim.SGD(p, lr=1.0), outer=outer
    )
    shared = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in model.module.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in shared.items()}
    moved = {name: torch.zeros_like(value) for name, value in shared.items()}
    for step in range(7):
        optimizer.zero_grad()
        model(whole_grads(model.module, 10 * step + rank)).backward()
        if step in (2, 4, 6):  # an exchange comes before the forward pass
            for name, mean in moved.items():
                dist.all_reduce(mean)
                mean /= 4
                velocity[name] = 0.25 * velocity[name] + mean
                shared[name] -= 0.5 * (mean + 0.25 * velocity[name])
                mean.zero_()
        for name, parameter in model.module.named_parameters():
            moved[name] += parameter.grad.flatten()
        optimizer.step()
        for name, value in shared.items():
            assert torch.equal(sieve.shared_parameters()[name], value), (step, name)
            assert torch.equal(sieve.engine.offset(name), moved[name]), (step, name)
    assert sieve.stats.steps == 3
    sieve.close()


@on_ranks(4)
def test_forgotten_residuals_are_the_third_term_of_the_law(rank: int) -> None:
    """In = delivered + kept + forgotten, and all local steps begin at the shared model."""
    for recipe, density in (("topka", 0.01), ("sparseloco", 1 / 64)):
        check_forgetting(rank, recipe, density)


def check_forgetting(rank: int, recipe: str, density: float) -> None:
    outer = gradsieve.Outer(local_steps=2, decay=0.5, ahead=False)
    model, sieve, optimizer = started(
        recipe, density, net=Whole(torch.float64), make=lambda p: torch.optim.SGD(p, lr=1.0), outer=outer
    )
    given = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in model.module.named_parameters()}
    forgotten = {name: torch.zeros_like(value) for name, value in given.items()}
    for step in range(8):
        optimizer.zero_grad()
        loss = model(whole_grads(model.module, 10 * step + rank))
        loss.backward()
        if step in (2, 4, 6):
            for name in given:  # half of what an exchange left over is forgotten: as much as is kept
                forgotten[name] += sieve.engine.residual(name)
            assert all(not sieve.engine.offset(name).any() for name in given)
        for name, parameter in model.module.named_parameters():
            given[name] += parameter.grad.flatten()
        optimizer.step()
    for name in given:
        kept = sieve.engine.residual(name) + sieve.engine.offset(name)
        total = forgotten[name] + kept - given[name]
        dist.all_reduce(total)
        delivered = -4 * sieve.shared_parameters()[name]
        assert torch.allclose(total + delivered, torch.zeros_like(total), atol=1e-9), (recipe, name)
    assert sieve.stats.delivered_entries > 0
    sieve.close()


@on_ranks(4)
def test_sparseloco_as_published_learns(rank: int) -> None:
    """64 of 4,096 entries of each matrix after 30 local steps: the loss on data of no rank falls."""
    model, sieve, optimizer = started("sparseloco", 1 / 64, outer=gradsieve.SPARSELOCO)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    with torch.no_grad():
        loss = loss_of(model.module, 99, 0).item()
    for exchanges in range(4):
        train(model, range(30 * exchanges, 30 * exchanges + 30), rank, optimizer)
        sieve.exchange()
        assert sieve.stats.steps == exchanges + 1
        assert sieve.stats.last.selected_entries == 64 + 64 + 48  # of 64 x 64, 64 x 64 and 64 x 48
        assert same_everywhere(parameters_digest(model))
    with torch.no_grad():
        assert loss_of(model.module, 99, 0).item() < 0.5 * loss
    for name in ("first.weight", "second.weight", "third.weight"):
        moved = (model.module.get_parameter(name) != before[name]).sum()
        assert 64 <= moved <= 4 * 4 * 64, name
        assert sieve.engine.residual(name).any(), name
    sieve.close()


@on_ranks(4)
def test_adam_on_sparse_gradients_is_warned_of_once(rank: int) -> None:
    for make, losing in ((torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.SGD, False)):
        model = DistributedDataParallel(Net())
        sieve = gradsieve.attach(model, density=0.05)
        optimizer, other = make(model.parameters(), lr=0.01), torch.optim.Adam(nn.Linear(2, 2).parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.step()
            train(model, range(3), rank, optimizer)
        told = [str(each.message) for each in caught if "exchange its updates instead" in str(each.message)]
        assert len(told) == losing, make
        assert all(make.__name__ in text for text in told)
        sieve.close()
    model, sieve, optimizer = started()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, range(2), rank, optimizer)
    sieve.close()
    for recipe in ("dense", "topka"):  # nothing is left behind, and nothing lost
        model, sieve, _ = attached(recipe, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, range(2), rank, torch.optim.AdamW(model.parameters()))
        sieve.close()
    # Several models: torch iterates over its hooks while it calls them, and none may be removed meanwhile.
    several = [attached("oktopk") for _ in range(3)]
    for model, _, optimizer in several:
        train(model, range(2), rank, optimizer)
    for _, sieve, _ in several:
        sieve.close()


@on_ranks(4)
def test_rates_of_their_own_have_groups_of_their_own(rank: int) -> None:
    """One step size for updates of different size would drown the small ones; what has no updates must not move."""
    model = DistributedDataParallel(Net())
    net, start = model.module, copy.deepcopy(model.module.state_dict())
    optimizer = torch.optim.AdamW(
        [
            {"params": net.first.parameters(), "lr": 1e-2},
            {"params": net.second.parameters(), "lr": 1e-5},
            {"params": net.third.parameters(), "lr": 0.0, "weight_decay": 0.0},
        ]
    )  # the head is no part of it
    sieve = gradsieve.attach(model, optimizer=optimizer, check_replicas_every=1)
    train(model, range(12), rank, optimizer)
    moved = {name: (value - start[name]).abs().max().item() for name, value in net.state_dict().items()}
    assert moved["first.weight"] > 1e-3
    assert 0 < moved["second.weight"] < 1e-3
    assert all(moved[name] == 0 for name in ("third.weight", "third.bias", "head.weight", "head.bias"))
    assert same_everywhere(parameters_digest(model))
    optimizer.add_param_group({"params": net.head.parameters()})
    with pytest.raises(gradsieve.InputError, match="other parameters than when attach was called"):
        train(model, range(12, 13), rank, optimizer)
    sieve.close()


@on_ranks(4)
def test_what_does_not_go_with_updates_is_refused(rank: int) -> None:
    model = DistributedDataParallel(Net())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for pattern, options in (
        ("has none of the model's parameters", {"optimizer": other}),
        ("LBFGS evaluates the model several times per step", {"optimizer": torch.optim.LBFGS(model.parameters())}),
        ("must be a torch.optim.Optimizer, got str", {"optimizer": "adam"}),
        ("local_clip_norm clips gradients", {"optimizer": own, "local_clip_norm": 1.0}),
        ("holds the optimizer's momentum", {"optimizer": own, "recipe": "dgc", "density": 0.1}),
        ("density must be given with recipe oktopk", {}),
        ("density must be given with recipe topka", {"optimizer": own, "recipe": "topka"}),
        ("local_steps and outer are for the exchange of updates", {"density": 0.1, "local_steps": 4}),
        ("local_steps must be at least 1, got 0", {"optimizer": own, "local_steps": 0}),
    ):
        with pytest.raises(gradsieve.InputError, match=pattern):
            gradsieve.attach(model, **options)
