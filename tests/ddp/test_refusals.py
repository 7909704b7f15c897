"""DDP in two lines, on real processes: what is refused, and how errors reach the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import Rules
from support.ddp_models import (
    GROUP_MB,
    Net,
    attached,
    loss_of,
    state_tensors,
    train,
)
from support.rank_pool import on_ranks


@on_ranks(4)
def test_handshake_names_who_differs(rank: int) -> None:
    model = DistributedDataParallel(Net())
    with pytest.raises(gradsieve.MismatchError, match=r"rank 2 has density 0.02, ranks 0, 1, 3 have 0.01$"):
        gradsieve.attach(model, "oktopk", density=0.02 if rank == 2 else 0.01)
    with pytest.raises(gradsieve.MismatchError, match=r"rank 0 has recipe .*TopkA.*, ranks 1, 2, 3 have .*OkTopk"):
        gradsieve.attach(model, "topka" if rank == 0 else "oktopk", density=0.01)
    with pytest.raises(gradsieve.MismatchError, match=r"number of groups 2, ranks .* have 4"):
        gradsieve.attach(model, density=0.01, group_mb=None if rank == 1 else GROUP_MB)
    gradsieve.attach(model, density=0.01).close()


@on_ranks(4)
def test_what_cannot_be_attached_is_refused(rank: int) -> None:
    with pytest.raises(gradsieve.InputError, match="needs a DistributedDataParallel model, got Net: wrap it first"):
        gradsieve.attach(Net(), density=0.1)
    model, sieve, _ = attached()
    with pytest.raises(gradsieve.InputError, match="a sieve is already attached to this model"):
        gradsieve.attach(model, density=0.1)
    sieve.close()
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(gradsieve.InputError, match=r"already has a communication hook \(allreduce_hook\)"):
        gradsieve.attach(hooked, density=0.1)
    embedding = DistributedDataParallel(nn.Sequential(nn.Embedding(100, 30, sparse=True), nn.Linear(30, 2)))
    with pytest.raises(gradsieve.InputError, match="module 0 is made with sparse=True.*make it with sparse=False"):
        gradsieve.attach(embedding, density=0.1)
    good = DistributedDataParallel(Net())
    for settings, pattern in (
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"density": "1%"}, "density must be a number"),
        ({"density": 0.1, "group_mb": 0}, "group_mb must be positive"),
        ({"density": 0.1, "rules": Rules(exclude=("encoder.*",))}, r"pattern 'encoder.\*' matches no parameter"),
        ({"density": 0.1, "local_clip_norm": -1.0}, "local_clip_norm must be positive"),
        ({"density": 0.1, "check_replicas_every": -1}, "check_replicas_every must not be negative, got -1"),
        ({"density": 0.1, "scaler": 3}, "scaler must be a torch.amp.GradScaler, got int"),
        ({"density": 0.1, "timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
    ):
        with pytest.raises(gradsieve.InputError, match=pattern):
            gradsieve.attach(good, **settings)
    lonely = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    with pytest.warns(RuntimeWarning, match="one rank only"):
        alone, sieve, optimizer = attached(ddp={"process_group": lonely})
    train(alone, range(3), rank, optimizer)
    sieve.close()


@on_ranks(4)
def test_a_hook_that_never_runs_is_noticed(rank: int) -> None:
    model, sieve, optimizer = attached()
    for step in range(5):  # no exchange is meant here, and none is missed
        with model.no_sync():
            loss_of(model, rank, step).backward()
        optimizer.step()
    with torch.no_grad():
        for step in range(5):
            loss_of(model, rank, step)
    with pytest.raises(gradsieve.GradsieveError, match="updated 3 times and DDP has not called the hook"):
        train(model.module, range(6), rank, optimizer)
    sieve.close()
    model, sieve, _ = attached()
    with pytest.warns(RuntimeWarning, match="3 forward passes for training and DDP has not called the hook once"):
        # An optimizer that goes round autograd leaves no other trace than forward passes.
        sum(loss_of(model.module, rank, step) for step in range(4)).backward()
    sieve.close()


class Failing(gradsieve.reducers.topka.TopkA):  # type: ignore[name-defined]
    """Works twice, for the first two groups of the first step."""

    def reduce(self, local: Any, k: int, state: Any, comm: Any) -> Any:
        if comm.comm.traffic.calls > 1:  # under the timed comm, the one that counts
            raise ConnectionError("the network is gone")
        return super().reduce(local, k, state, comm)


@on_ranks(4)
def test_errors_surface_with_their_type_and_place(rank: int) -> None:
    recipe = gradsieve.Recipe(gradsieve.selectors.exact.Exact(), Failing())
    model, sieve, _ = attached(recipe, ddp={"bucket_cap_mb": 0.01})
    with pytest.raises(
        gradsieve.ExchangeError, match=rf"rank {rank}: step 0, group 2 of 4.*first.weight.*gone"
    ) as info:
        loss_of(model, rank, 0).backward()
    assert isinstance(info.value.__cause__, ConnectionError)
    assert not any(vector.any() for vector in state_tensors(sieve))
    sieve.close()
    model, sieve, _ = attached()
    sieve.close()
    with pytest.raises(gradsieve.GradsieveError, match="this sieve has been closed"):
        loss_of(model, rank, 0).backward()


class OddError(gradsieve.GradsieveError):
    """An error of a user's own, whose constructor takes no text."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"odd {code}: {detail}")


class FailingOddly(gradsieve.reducers.topka.TopkA):  # type: ignore[name-defined]
    def reduce(self, local: Any, k: int, state: Any, comm: Any) -> Any:
        raise OddError(7, detail="gone")


class EndingSink(gradsieve.Sink):
    every_rank = True

    def open(self, rank: int) -> None:
        pass

    def write(self, stats: gradsieve.Stats) -> None:
        raise SystemExit(3)


@on_ranks(4)
def test_errors_of_any_kind_reach_the_next_wait(rank: int) -> None:
    """Both ended the exchanging thread once, and the next backward pass waited for ever."""
    model, sieve, _ = attached(gradsieve.Recipe(gradsieve.selectors.exact.Exact(), FailingOddly()))
    with pytest.raises(gradsieve.ExchangeError, match="odd 7: gone") as info:
        loss_of(model, rank, 0).backward()
    assert isinstance(info.value.__cause__, OddError)
    sieve.close()
    model, sieve, _ = attached()
    sieve.add_sink(EndingSink())
    loss_of(model, rank, 0).backward()
    with pytest.raises(gradsieve.ExchangeError, match=r"failed before this call: SystemExit\(3\)"):
        sieve.flush()
    sieve.close()
