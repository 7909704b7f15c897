"""What is checked on real processes under DDP. Each check runs on all ranks of one job; `run_checks` runs many in turn.

A check asserts: a failure on any rank ends the job, and its sentence names the check.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsieve
from ddp_models import (
    GROUP_MB,
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
from gradsieve import RECIPES, Rules, Sieve
from gradsieve.checkpoint.dcp import read_states
from gradsieve.lab.rank_processes import RankProcess
from gradsieve.recipes import recipe as named_recipe

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1000},
    {"static_graph": True, "bucket_cap_mb": 0.01},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.03},
]


def run_checks(process: RankProcess, names: Sequence[str], module: str = __name__) -> None:
    torch.set_num_threads(1)
    for name in names:
        check: Callable[[int], None] = getattr(import_module(module), name)
        try:
            check(process.rank)
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(place))
            raise AssertionError(f"{name}: {type(error).__name__}: {error} [{where}]") from error
        dist.barrier()


def density_one_is_dense_ddp(rank: int) -> None:
    plain = DistributedDataParallel(Net())
    train(plain, range(4), rank, torch.optim.SGD(plain.parameters(), lr=0.1))
    for recipe in RECIPES:
        model, sieve, optimizer = attached(named_recipe(recipe, values="exact"), 1.0)
        train(model, range(4), rank, optimizer)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), recipe
        sieve.close()


def density_one_is_dense_ddp_bit_for_bit_on_whole_numbers(rank: int) -> None:
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


def replicas_stay_equal(rank: int, steps: int = 8) -> None:
    for recipe in RECIPES:
        model, sieve, optimizer = attached(recipe, 0.02)
        train(model, range(steps), rank, optimizer)
        assert same_everywhere(parameters_digest(model)), recipe
        assert sieve.stats.steps == steps
        assert sieve.stats.selected_entries > 0
        sieve.close()


def replicas_stay_equal_for_long(rank: int) -> None:
    replicas_stay_equal(rank, steps=200)


def drift_is_found(rank: int) -> None:
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


def replicas_that_are_equal_raise_no_alarm(rank: int) -> None:
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


def layouts_give_the_same_bits(rank: int) -> None:
    for recipe in ("oktopk", "dgc"):
        seen = {}
        for number, layout in enumerate(LAYOUTS):
            model, sieve, optimizer = attached(recipe, ddp=layout, local_clip_norm=0.5)
            train(model, range(5), rank, optimizer)
            seen[number] = (parameters_digest(model), digest(state_tensors(sieve)))
            sieve.close()
        assert len(set(seen.values())) == 1, (recipe, seen)


def mixed_dtypes(rank: int) -> None:
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


def bfloat16_models(rank: int) -> None:
    model, sieve, optimizer = attached(model=Net((torch.bfloat16,) * 3))
    before = loss_of(model, 0, 0).item()
    train(model, range(10), rank, optimizer)
    assert same_everywhere(parameters_digest(model))
    assert loss_of(model, 0, 0).item() < before
    assert all(vector.dtype == torch.float32 for vector in state_tensors(sieve))
    sieve.close()


def nan_skips_everywhere(rank: int) -> None:
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


def grad_scaler(rank: int) -> None:
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


def no_sync_accumulates(rank: int) -> None:
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


def uneven_inputs_with_join(rank: int) -> None:
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


def join_with_a_scaler_keeps_what_it_cannot_scale(rank: int) -> None:
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


def unused_parameters_lose_nothing(rank: int) -> None:
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


def dense_for_a_while(rank: int) -> None:
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


def schedules_and_rules(rank: int) -> None:
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


def clipping(rank: int) -> None:
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


def odd_models(rank: int) -> None:
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


def exchange_overlaps_backward(rank: int) -> None:
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


def groups_known_to_some_ranks_only(rank: int) -> None:
    """Ranks that know different numbers of process groups must still find each other."""
    dist.new_group([0], use_local_synchronization=True)
    model, sieve, optimizer = attached()
    train(model, range(2), rank, optimizer)
    assert same_everywhere(parameters_digest(model))
    sieve.close()


def subgroups_and_two_models(rank: int) -> None:
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


def copied(state: Any) -> Any:
    """By way of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed_equals_uninterrupted(rank: int) -> None:
    for recipe in [*RECIPES, *(named_recipe(name, values="int8") for name in ("oktopk", "gtopk", "spardl"))]:
        schedule = gradsieve.Exponential(0.2, 0.02, 4)
        straight, sieve, optimizer = attached(recipe, schedule)
        train(straight, range(6), rank, optimizer)
        half, saved_sieve, optimizer = attached(recipe, schedule, ddp={"bucket_cap_mb": 0.02})
        train(half, range(3), rank, optimizer)
        model, kept = copied(half.module.state_dict()), saved_sieve.state_dict()
        train(half, range(3, 5), rank, optimizer)  # what was kept must not follow
        saved_sieve.close()
        restored = Net()
        restored.load_state_dict(model)
        resumed, resumed_sieve, optimizer = attached(recipe, schedule, model=restored)
        resumed_sieve.load_state_dict(copied(kept))
        train(resumed, range(3, 6), rank, optimizer)
        assert parameters_digest(resumed) == parameters_digest(straight), recipe
        assert digest(state_tensors(resumed_sieve)) == digest(state_tensors(sieve)), recipe
        sieve.close()
        resumed_sieve.close()


def states_that_do_not_fit_are_refused(rank: int) -> None:
    _, sieve, _ = attached("oktopk")
    good = own_state(sieve)

    def refused(pattern: str, key: str = f"rank {rank} of 4", **changes: Any) -> None:
        with pytest.raises(gradsieve.InputError, match=pattern):
            sieve.load_state_dict({key: {**good, **changes}})

    other = (rank + 1) % 4
    refused(f"must be this rank's own .* holds 'rank {other} of 4'", key=f"rank {other} of 4")
    refused("those of all 3 ranks.*holds 'rank 0 of 3', and 'rank 1 of 3', 'rank 2 of 3' are", key="rank 0 of 3")
    refused("or those of all ranks of one run; it holds 'model'", key="model")
    with pytest.raises(gradsieve.InputError, match=r"steps_done is 7 on old rank 1, 0 on old rank 0"):
        sieve.load_state_dict({"rank 0 of 2": good, "rank 1 of 2": {**good, "steps_done": 7}})
    refused("saved with recipe Other", recipe="Other")
    refused("belongs to another model", names=("other",))
    short = {**good["parameters"], "first.weight": {"residual": torch.zeros(3)}}
    refused("residual of parameter first.weight must have 4096 entries, the state has 3", parameters=short)
    refused("kept dense in this run", parameters={**good["parameters"], "first.bias": {"residual": torch.ones(64)}})
    sieve.close()


def distributed_checkpoint_keeps_every_rank(rank: int) -> None:
    """By way of `torch.distributed.checkpoint`, which keeps one copy of what has the same name."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    for recipe in ("oktopk", "dgc"):
        path = f"{folder[0]}/{recipe}"
        straight, sieve, optimizer = attached(recipe)
        train(straight, range(3), rank, optimizer)
        dcp.save({"model": straight.module.state_dict(), "sieve": sieve}, checkpoint_id=path)
        kept = own_state(sieve)
        train(straight, range(3, 6), rank, optimizer)
        resumed, other, optimizer = attached(recipe)
        weights = resumed.module.state_dict()
        dcp.load({"model": weights, "sieve": other}, checkpoint_id=path)
        assert digest(state_tensors(other)) == digest(
            t for _, v in sorted(kept["parameters"].items()) for t in _sorted(v)
        )
        train(resumed, range(3, 6), rank, optimizer)
        assert parameters_digest(resumed) == parameters_digest(straight), recipe
        assert digest(state_tensors(other)) == digest(state_tensors(sieve)), recipe
        _loads_onto_a_smaller_group(rank, recipe, path, kept)
        sieve.close()
        other.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def _sorted(vectors: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(vectors.items())]


def _loads_onto_a_smaller_group(rank: int, recipe: str, path: str, kept: dict[str, Any]) -> None:
    """Ranks 0 to 2 go on with what four had saved."""
    sums = {name: vectors["residual"].double() for name, vectors in sorted(kept["parameters"].items())}
    for vector in sums.values():
        dist.all_reduce(vector)
    fewer = dist.new_group([0, 1, 2])
    if rank < 3:
        _, sieve, _ = attached(recipe, ddp={"process_group": fewer})
        sieve.load_state_dict(read_states(path))
        for name, vectors in sorted(own_state(sieve)["parameters"].items()):
            total = vectors["residual"].double()
            dist.all_reduce(total, group=fewer)
            assert torch.allclose(total, sums[name], rtol=1e-6, atol=1e-8), name
        sieve.close()


def handshake_names_who_differs(rank: int) -> None:
    model = DistributedDataParallel(Net())
    with pytest.raises(gradsieve.MismatchError, match=r"rank 2 has density 0.02, ranks 0, 1, 3 have 0.01$"):
        gradsieve.attach(model, "oktopk", density=0.02 if rank == 2 else 0.01)
    with pytest.raises(gradsieve.MismatchError, match=r"rank 0 has recipe .*TopkA.*, ranks 1, 2, 3 have .*OkTopk"):
        gradsieve.attach(model, "topka" if rank == 0 else "oktopk", density=0.01)
    with pytest.raises(gradsieve.MismatchError, match=r"number of groups 2, ranks .* have 4"):
        gradsieve.attach(model, density=0.01, group_mb=None if rank == 1 else GROUP_MB)
    gradsieve.attach(model, density=0.01).close()


def what_cannot_be_attached_is_refused(rank: int) -> None:
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


def a_hook_that_never_runs_is_noticed(rank: int) -> None:
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


def errors_surface_with_their_type_and_place(rank: int) -> None:
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


def errors_of_any_kind_reach_the_next_wait(rank: int) -> None:
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
