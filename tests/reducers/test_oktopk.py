"""Ok-Topk: its traffic, its balance, its thresholds and its calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve import REDUCERS, CountingComm, InputError, MessageError, SparseVector
from gradsieve.comm import Comm, Traffic
from gradsieve.functional import sparse_allreduce
from gradsieve.recipes import RECIPES
from gradsieve.reducers.oktopk import OkTopk, OkTopkState
from gradsieve.reducers.quantiles import Summary
from gradsieve.selectors.exact import Exact
from gradsieve.testing import run_ranks

NUMEL, K = 320_000, 8000


def crowded(rank: int, step: int) -> Tensor:
    """Nine tenths of the large entries in the first twentieth of the vector."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(NUMEL, generator=generator)
    x[: NUMEL // 20] *= 20
    return x


def apart(rank: int, step: int) -> Tensor:
    """A quarter of the ranks has its large entries at the back, the others at the front."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(NUMEL, generator=generator)
    tenth = NUMEL // 10
    x[slice(-tenth, None) if rank % 4 == 3 else slice(0, tenth)] *= 20
    return x


def layered(rank: int, step: int) -> Tensor:
    """Layers of different scales, and a part that all ranks share."""
    scales = torch.logspace(-2, 0, 16).repeat_interleave(NUMEL // 16)
    shared = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
    own = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + rank + 1))
    return (shared + own) * scales


class Step(NamedTuple):
    local: int
    total: int
    traffic: Traffic
    state: OkTopkState


def run(size: int, gradient: Any, steps: int, reducer: OkTopk | None = None) -> list[list[Step]]:
    """Steps by rank, of exact top-k without feedback: every step is as skewed as the gradient."""
    chosen = reducer or OkTopk()

    def rank(comm: Comm) -> list[Step]:
        counting = CountingComm(comm)
        state, done = chosen.init(NUMEL, counting), []
        for step in range(steps):
            x = gradient(comm.rank, step)
            local, _ = Exact()(x, K, Exact().init(NUMEL))
            counting.reset()
            (total, _), state = chosen(local, K, state, counting)
            done.append(Step(local.nnz, total.nnz, counting.traffic, state))
        return done

    return run_ranks(size, rank)


@pytest.mark.parametrize("gradient", [crowded, apart, layered])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, pytest.param(16, marks=pytest.mark.long), 32])
def test_words_stay_within_the_papers_bound_on_skewed_gradients(size: int, gradient: Any) -> None:
    """Every byte counted: entries, headers, frames and quantile points."""
    for done in run(size, gradient, 5):
        for step in done:
            most = max(step.local, step.total)
            assert step.traffic.bytes_received <= 4 * 6 * most * (size - 1) / size


@pytest.mark.parametrize("gradient", [crowded, apart, layered])
@pytest.mark.parametrize("size", [2, 4, 8, pytest.param(16, marks=pytest.mark.long)])
def test_words_average_near_the_balanced_cost(size: int, gradient: Any) -> None:
    """At most 4.3k(P-1)/P a rank and step, every byte counted."""
    received = [step.traffic.bytes_received for done in run(size, gradient, 12) for step in done]
    assert sum(received) / len(received) <= 4 * 4.3 * K * (size - 1) / size


def test_equal_regions_would_break_the_bound() -> None:
    """The balancing is the algorithm: the same gradients over equal regions."""
    size = 8

    def rank(comm: Comm) -> int:
        counting = CountingComm(comm)
        reducer = REDUCERS["topkdsa"]()
        local, _ = Exact()(crowded(comm.rank, 0), K, Exact().init(NUMEL))
        state = reducer.init(NUMEL, counting)
        counting.reset()
        reducer(local, K, state, counting)
        return counting.traffic.bytes_received

    assert max(run_ranks(size, rank)) > 4 * 6 * K * (size - 1) / size


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_the_global_count_is_about_k(size: int) -> None:
    for done in run(size, layered, 4):
        for step in done:
            assert 0.85 * K <= step.total <= 1.15 * K


def test_a_step_needs_two_calls_and_one_more_where_the_threshold_is_evaluated() -> None:
    calls = [step.traffic.calls for step in run(4, layered, 24)[0]]
    assert calls[0] == 4  # regions and threshold
    assert calls[1] == 3  # the first prediction is tried, not trusted
    assert calls[2:] == [2] * 22


def test_another_k_is_met_at_once() -> None:
    """A density schedule changes k; the threshold for the old one would be wrong for a step."""

    def rank(comm: Comm) -> list[float]:
        reducer, counts = OkTopk(), []
        state = reducer.init(NUMEL, comm)
        for step, k in enumerate([K, K, K // 4, K // 4]):
            local, _ = Exact()(layered(comm.rank, step), k, Exact().init(NUMEL))
            (total, _), state = reducer(local, k, state, comm)
            counts.append(total.nnz / k)
        return counts

    assert all(0.85 <= count <= 1.15 for count in run_ranks(4, rank)[0])


def test_evening_out_costs_two_calls_more_and_goes_on_while_owners_are_uneven() -> None:
    """Sizes after evening out are equal: taken for the owners' they would stop it every other step."""
    for step in run(4, crowded, 10, OkTopk(skew=1.0))[0][2:]:
        assert step.traffic.calls == 4


def at_the_back(rank: int, step: int) -> Tensor:
    """Regions are cut for entries everywhere; then all sums that matter lie in the last region."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(NUMEL, generator=generator)
    if step:
        x[-NUMEL // 16 :] *= 50
    return x


def test_blocks_are_evened_out_when_one_owner_has_most() -> None:
    """The owner of everything would have to send all blocks; evened out, nobody sends more than its share."""
    size = 8
    plain = run(size, at_the_back, 4, OkTopk(imbalance=float(size), skew=float(size)))
    evened = run(size, at_the_back, 4, OkTopk(imbalance=float(size)))  # else the regions would follow
    assert evened[0][1].state.skewed
    most = [max(done[3].traffic.bytes_sent for done in ranks) for ranks in (plain, evened)]
    assert most[1] < 0.6 * most[0]
    totals = [[done[step].total for step in range(4)] for done in evened]
    assert all(total == totals[0] for total in totals)


def test_evened_blocks_give_the_same_total() -> None:
    def total(skew: float) -> list[SparseVector]:
        def rank(comm: Comm) -> list[SparseVector]:
            reducer = OkTopk(skew=skew)
            state, totals = reducer.init(NUMEL, comm), []
            for step in range(4):
                local, _ = Exact()(at_the_back(comm.rank, step), K, Exact().init(NUMEL))
                (result, _), state = reducer(local, K, state, comm)
                totals.append(result)
            return totals

        return run_ranks(5, rank)[3]

    for plain, evened in zip(total(5.0), total(1.0), strict=True):
        assert torch.equal(plain.indices, evened.indices)
        assert torch.equal(plain.values, evened.values)


def test_a_gradient_that_changes_its_scale_is_followed() -> None:
    def jumping(rank: int, step: int) -> Tensor:
        return layered(rank, step) * (100.0 if step >= 6 else 1.0)

    counts = [step.total / K for step in run(4, jumping, 9)[0]]
    assert counts[6] > 1.25  # nobody could know before
    assert all(0.85 <= count <= 1.15 for count in counts[7:])


def test_regions_follow_entries_that_move() -> None:
    """A growing residual spreads picks to other layers; regions cut for the first step do not fit for long."""

    def moving(rank: int, step: int) -> Tensor:
        return layered(rank, step) if step < 3 else layered(rank, step).flip(0).contiguous()

    following = [max(done[step].traffic.bytes_received for done in run(4, moving, 8)) for step in (2, 7)]
    assert following[1] < 1.3 * following[0]
    stuck = run(4, moving, 8, OkTopk(imbalance=4.0))
    assert max(done[7].traffic.bytes_received for done in stuck) > 1.3 * following[0]


def test_entries_that_wait_below_the_threshold_do_not_flood_it() -> None:
    """With error feedback a persistent gradient piles up just below the threshold: a reused one let 0.01k to 4k by."""

    def rank(comm: Comm) -> list[float]:
        shared = layered(0, 0)
        generator, state, counts = torch.Generator().manual_seed(comm.rank), None, []
        for _ in range(60):
            grad = 0.5 * shared + torch.randn(NUMEL, generator=generator)
            mean, state = sparse_allreduce(grad, RECIPES["oktopk"](), density=K / NUMEL, comm=comm, state=state)
            counts.append(int(mean.count_nonzero()) / K)
        return counts

    counts = run_ranks(4, rank)[0]
    assert sum(counts) / len(counts) == pytest.approx(1.0, abs=0.1)
    assert max(counts) < 1.6
    assert min(counts) > 0.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"threshold_points": 0}, "threshold_points must be at least 1, got 0"),
        ({"repartition_every": 0}, "repartition_every must be at least 1, got 0"),
        ({"skew": 0.5}, "skew and imbalance must be at least 1, got 0.5 and 1.15"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        OkTopk(**settings)


def test_counts_beyond_float32_are_told_exactly() -> None:
    """A count rounded up would pass for more than k: then at density one something would be left over."""
    for count in (0, 1, (1 << 24) + 1, 33_000_003, (1 << 40) + 7):
        assert Summary.read(Summary(count, np.ones(3, np.float32)).note()).count == count


class Lying(Comm):
    """A comm whose peer sends something else in the n-th exchange."""

    def __init__(self, comm: Comm, at: int, lie: Tensor) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.left, self.lie = at, lie

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.comm.all_reduce(tensor)

    def send_recv(self, buffer: Tensor, to: int | None, source: int | None) -> Tensor | None:
        return self.comm.send_recv(buffer, to, source)

    def all_to_all(self, buffers: Any) -> Any:
        lies = self.left == 0
        self.left -= 1
        for source, buffer in self.comm.all_to_all(buffers):
            yield source, self.lie.clone() if lies and source != self.rank else buffer


@pytest.mark.parametrize(
    ("at", "lie"),
    [
        (0, torch.tensor([5, 3, 10_000_000])),  # an index that does not exist: a region would reach beyond the vector
        (0, torch.tensor([5, -7])),
        (0, torch.tensor([-5, 3])),
        (0, torch.empty(0, dtype=torch.int64)),
        (2, torch.empty(0)),
        (2, torch.tensor([1.0])),
        (2, torch.tensor([-1.0, 3.0, 1.0])),
        (2, torch.tensor([torch.nan, 3.0, 1.0])),
    ],
)
def test_quantiles_that_make_no_sense_are_refused(at: int, lie: Tensor) -> None:
    def rank(comm: Comm) -> None:
        reducer = OkTopk()
        state = reducer.init(1000, comm)
        local = SparseVector(torch.arange(0, 1000, 20), torch.linspace(-3, 3, 50), 1000)
        reducer(local, 20, state, Lying(comm, at, lie))

    with pytest.raises(MessageError, match=r"rank \d: rank \d reports"):
        run_ranks(2, rank)
