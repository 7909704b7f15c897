"""Error feedback: nothing is lost over time, and a step that fails leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import RECIPES, InputError, Recipe, SparseVector, sparse_allreduce
from gradsieve.comm import Comm
from gradsieve.feedback import MomentumResidual, Residual
from gradsieve.reducers.protocol import NoState, Reduced
from gradsieve.reducers.topka import TopkA
from gradsieve.selectors.exact import Exact
from gradsieve.testing import run_ranks
from gradsieve.vector import Rounding, Sum
from gradsieve.vector.pieces import Pieces

NUMEL = 300


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers: sums and quarters of them are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-8, 9, (NUMEL,), generator=generator).to(dtype)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("dense", "dgc")])
def test_what_went_in_came_out_or_is_still_there(name: str) -> None:
    """Over many steps: sum of gradients == size * sum of means + sum of residuals, exactly."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        state, given, delivered = None, torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step in range(12):
            grad = gradient(comm.rank, step)
            mean, state = sparse_allreduce(grad, name, density=0.05, comm=comm, state=state)
            given += grad
            delivered += mean * comm.size
        return given, delivered, state.feedback.residual

    results = run_ranks(4, rank)
    given = sum(result[0] for result in results)
    delivered = results[0][1]
    pending = sum(result[2] for result in results)
    assert delivered.any()
    assert torch.equal(given, delivered + pending)


class Failing(TopkA):
    """Breaks after everything has been accumulated and selected."""

    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        raise ConnectionError("the network is gone")


@pytest.mark.parametrize("feedback", [Residual(), MomentumResidual()])
def test_a_step_that_fails_leaves_the_residual_as_it_was(feedback: Residual | MomentumResidual) -> None:
    def rank(comm: Comm) -> None:
        good = Recipe(Exact(), RECIPES["oktopk"]().reducer, feedback)
        _, state = sparse_allreduce(gradient(0, 0), good, density=0.1, comm=comm)
        before = {name: t.clone() for name, t in state.feedback._asdict().items() if "spare" not in name}
        failing = Recipe(Exact(), Failing(), feedback)
        with pytest.raises(ConnectionError, match="gone"):
            sparse_allreduce(gradient(0, 1), failing, density=0.1, comm=comm, state=state)
        assert all(torch.equal(t, getattr(state.feedback, name)) for name, t in before.items())
        retried = sparse_allreduce(gradient(0, 1), good, density=0.1, comm=comm, state=state)
        fresh = sparse_allreduce(gradient(0, 0), good, density=0.1, comm=comm)
        straight = sparse_allreduce(gradient(0, 1), good, density=0.1, comm=comm, state=fresh.state)
        assert torch.equal(retried.mean, straight.mean)

    run_ranks(1, rank)


@pytest.mark.parametrize("name", RECIPES)
def test_a_nan_on_one_rank_skips_the_step_on_all(name: str) -> None:
    def rank(comm: Comm) -> None:
        _, state = sparse_allreduce(gradient(comm.rank, 0), name, density=0.05, comm=comm)
        before = {name: t.clone() for name, t in state.feedback._asdict().items() if "spare" not in name}
        broken = gradient(comm.rank, 1)
        if comm.rank == 2:
            broken[17] = torch.nan
        mean, after = sparse_allreduce(broken, name, density=0.05, comm=comm, state=state)
        assert not torch.isfinite(mean).all()
        if name != "dense":
            assert after is state
            assert all(torch.equal(t, getattr(after.feedback, name)) for name, t in before.items())
        good = sparse_allreduce(gradient(comm.rank, 2), name, density=0.05, comm=comm, state=after)
        assert torch.isfinite(good.mean).all()

    run_ranks(4, rank)


@pytest.mark.parametrize("kept_first", [False, True])
@pytest.mark.parametrize("rounding", [False, True])
def test_settling_by_what_has_changed_is_settling_by_all_entries(rounding: bool, kept_first: bool) -> None:
    """Also with a second part of the leftover, such as rounding errors, at entries that were sent and at others."""
    numel = gradient(0, 0).numel()
    positions = torch.arange(0, numel, 3)
    total = SparseVector(positions[::2].contiguous(), torch.ones(positions[::2].numel()), numel)
    more = SparseVector(torch.arange(0, numel, 4), torch.full((-(-numel // 4),), 0.125), numel)
    outcomes = []
    for known in (True, False):
        feedback, out = Residual(), Pieces([gradient(0, 0)])
        accumulated, *_ = feedback.accumulate(out, out, feedback.init(out), None, 0)
        sent = SparseVector(positions, accumulated[positions], numel)
        decoded = SparseVector(positions, sent.values.bfloat16().float(), numel)
        kept = (Rounding(sent, decoded) if rounding else Rounding.none(sent)).undelivered(total)
        assert kept.change_from(sent) is not None
        leftover: SparseVector = Sum([kept, more] if kept_first else [more, kept])
        if not known:
            leftover = SparseVector(leftover.indices, leftover.values, numel)
        outcomes.append(feedback.settle(accumulated, out, sent, leftover, feedback.init(out)).residual)
    assert torch.equal(*outcomes)
    assert not torch.equal(outcomes[0], gradient(0, 0))


def test_momentum_stops_where_it_was_delivered_also_if_everything_was_sent() -> None:
    """A full vector lies in the accumulated one itself: settled first, what had been sent was read as zero."""
    grad = torch.tensor([1.5, -2.5, 3.5, 0.75])
    velocities = []
    for copied in (False, True):
        feedback, out = MomentumResidual(0.9), Pieces([grad.clone()])
        state = feedback.init(out)
        accumulated, *_ = feedback.accumulate(out, out, state, None, 0)
        sent = SparseVector.full(accumulated.clone() if copied else accumulated)
        total = SparseVector(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]), 4)
        rounding = Rounding(sent, SparseVector.full(sent.values.clone() - 0.25))
        leftover = Sum([rounding.undelivered(total), SparseVector(torch.tensor([1]), torch.tensor([0.125]), 4)])
        velocities.append(feedback.settle(accumulated, out, sent, leftover, state).velocity)
    assert velocities[0].tolist() == velocities[1].tolist() == [0.0, -2.5, 0.0, 0.75]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_leave_a_float32_residual(dtype: torch.dtype) -> None:
    """A thousand small gradients in one coordinate must not be rounded away one by one."""

    def rank(comm: Comm) -> None:
        grad = torch.zeros(8, dtype=dtype)
        grad[0], grad[1] = 1.0, 2**-10
        state = None
        delivered = torch.zeros(8)
        for _ in range(1200):
            mean, state = sparse_allreduce(grad, "topka", density=1 / 8, comm=comm, state=state)
            assert mean.dtype == dtype
            delivered += mean.float()
        assert state.feedback.residual.dtype == torch.float32
        # What is delivered is rounded once, when it is written to a gradient of this dtype.
        once = pytest.approx(1200 * 2**-10, rel=torch.finfo(dtype).eps)
        assert float(delivered[1] + state.feedback.residual[1]) == once
        assert float(delivered[1]) > 0.9

    run_ranks(1, rank)


def test_momentum_correction_follows_its_definition() -> None:
    """u = m u + g; v += u; what is sent clears u and v; the rest of both stays."""
    feedback = MomentumResidual(momentum=0.5)
    state = feedback.init(Pieces([torch.zeros(3)]))
    grad = torch.tensor([4.0, 2.0, 1.0])
    accumulated, *_ = feedback.accumulate(Pieces([grad]), Pieces([grad]), state, None, 1)
    assert accumulated.tolist() == [4.0, 2.0, 1.0]
    sent = SparseVector(torch.tensor([0]), torch.tensor([4.0]), 3)
    state = feedback.settle(accumulated, Pieces([grad]), sent, SparseVector.empty(3, grad), state)
    assert state.velocity.tolist() == [0.0, 2.0, 1.0]
    assert state.residual.tolist() == [0.0, 2.0, 1.0]
    accumulated, *_ = feedback.accumulate(Pieces([grad]), Pieces([grad]), state, None, 1)
    assert accumulated.tolist() == [4.0, 2.0 + 0.5 * 2 + 2, 1.0 + 0.5 + 1]


def test_momentum_stays_where_an_entry_was_sent_but_not_delivered() -> None:
    feedback = MomentumResidual(momentum=0.5)
    state = feedback.init(Pieces([torch.zeros(2)]))
    grad = torch.tensor([4.0, 2.0])
    accumulated, *_ = feedback.accumulate(Pieces([grad]), Pieces([grad]), state, None, 1)
    sent = SparseVector(torch.tensor([0, 1]), grad.clone(), 2)
    undelivered = SparseVector(torch.tensor([1]), torch.tensor([2.0]), 2)
    state = feedback.settle(accumulated, Pieces([grad]), sent, undelivered, state)
    assert state.velocity.tolist() == [0.0, 2.0]
    assert state.residual.tolist() == [0.0, 2.0]


def test_momentum_goes_where_an_entry_was_delivered_but_for_its_rounding() -> None:
    feedback = MomentumResidual(momentum=0.5)
    state = feedback.init(Pieces([torch.zeros(4)]))
    grad = torch.tensor([4.0, 2.0, 1.0, 3.0])
    accumulated, *_ = feedback.accumulate(Pieces([grad]), Pieces([grad]), state, None, 1)
    sent = SparseVector(torch.tensor([0, 1, 3]), torch.tensor([4.0, 2.0, 3.0]), 4)
    # The rounding of entry 0; all of entry 1, with a sum of others; entry 2 was another's.
    left = SparseVector(torch.tensor([0, 1, 2]), torch.tensor([0.25, 5.0, 9.0]), 4)
    state = feedback.settle(accumulated, Pieces([grad]), sent, left, state)
    assert state.velocity.tolist() == [0.0, 2.0, 1.0, 0.0]
    assert state.residual.tolist() == [0.25, 5.0, 10.0, 0.0]


def test_momentum_must_be_below_one() -> None:
    with pytest.raises(InputError, match=r"momentum must be in \[0, 1\), got 1.0"):
        MomentumResidual(momentum=1.0)
