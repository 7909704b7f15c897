"""The signal's share of the ranks' gradients: measured from a sample, the same on all ranks, saved and resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsieve
from gradsieve.comm import Comm, CountingComm
from gradsieve.testing import run_ranks
from gradsieve.updates import signal
from gradsieve.updates.signal import (
    ALWAYS_MEASURED,
    ENERGY,
    MEASURED_EVERY,
    NO_SAMPLE,
    SIGNAL,
    SignalMeter,
    is_measured,
)

SIZES = {"large": 40_000, "small": 300, "bias": 5}


class Rank:
    """One rank's parameters, whose gradients are a common signal and noise of its own with variance one."""

    def __init__(self, comm: Comm, signals: dict[str, float], sizes: dict[str, int] = SIZES) -> None:
        self.comm = comm
        self.parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        self.optimizer: Optimizer = gradsieve.AdamW(self.parameters.values(), lr=0.0)
        self.meter = SignalMeter(self.parameters, self.optimizer)
        self.signals = signals
        self._common = torch.Generator().manual_seed(7)
        self._own = torch.Generator().manual_seed(100 + comm.rank)

    def step(self, number: int) -> None:
        for name, parameter in self.parameters.items():
            common = torch.randn(parameter.numel(), generator=self._common)  # turns from step to step
            parameter.grad = self.signals[name] * common + torch.randn(parameter.numel(), generator=self._own)
        self.meter.take(number)
        self.optimizer.step()

    def exchange(self, number: int) -> None:
        self.meter.exchange(number, self.comm)

    def run(self, steps: int) -> Rank:
        for number in range(steps):
            self.step(number)
            self.exchange(number)
        return self

    def share(self, name: str) -> float:
        state = self.optimizer.state[self.parameters[name]]
        return float(state[SIGNAL] / state[ENERGY])


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_the_share_is_found_although_the_signal_turns(strength: float, size: int) -> None:
    """Successive gradients of one rank have nothing in common here: what ranks share, only they can tell."""
    signals = {"large": strength, "small": strength, "bias": strength}
    ranks = run_ranks(size, lambda comm: Rank(comm, signals).run(200))
    expected = strength**2 / (strength**2 + 1)
    assert ranks[0].share("large") == pytest.approx(expected, abs=0.05)
    assert ranks[0].share("small") == pytest.approx(expected, abs=0.2), "eight entries per step"
    assert ranks[0].share("bias") == pytest.approx(expected, abs=0.3), "all of its five"
    for other in ranks[1:]:
        assert other.optimizer.state[other.parameters["large"]][SIGNAL] == pytest.approx(
            ranks[0].optimizer.state[ranks[0].parameters["large"]][SIGNAL]
        )


def test_each_parameter_has_its_own_share() -> None:
    (first, *_) = run_ranks(4, lambda comm: Rank(comm, {"large": 0.0, "small": 3.0, "bias": 3.0}).run(100))
    assert first.share("large") < 0.1
    assert first.share("small") > 0.7
    assert first.share("bias") > 0.7


def test_what_it_sends_is_little() -> None:
    def rank(comm: Comm) -> int:
        counting = CountingComm(comm)
        Rank(counting, {"matrix": 1.0}, {"matrix": 1_000_000}).run(ALWAYS_MEASURED + 80)
        return counting.traffic.calls

    numbers = range(ALWAYS_MEASURED + 80)
    assert run_ranks(2, rank) == [sum(map(is_measured, numbers))] * 2
    assert sum(map(is_measured, numbers)) == ALWAYS_MEASURED + 80 // MEASURED_EVERY
    assert signal._num_entries(1_000_000) == 128
    assert signal._num_entries(3000) == 23
    assert signal._num_entries(100) == 8
    assert signal._num_entries(3) == 3


def test_positions_move_and_cover_the_vector() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    meter = SignalMeter({"weight": parameter}, torch.optim.AdamW([parameter]))
    parameter.grad = torch.arange(1000.0)
    seen: set[float] = set()
    for number in range(ALWAYS_MEASURED):
        meter.take(number)
        seen |= set(meter.sample[1:].tolist())
    assert len(seen) > 0.9 * 8 * ALWAYS_MEASURED
    assert max(seen) < 1000


def run_with(change: Any, steps: int = 3) -> list[Rank]:
    """Three ranks, the last of which is changed before its last step."""

    def rank(comm: Comm) -> Rank:
        one = Rank(comm, {"large": 1.0, "small": 1.0, "bias": 1.0})
        one.run(steps - 1)
        one.kept = copy.deepcopy(dict(one.optimizer.state[one.parameters["large"]]))  # type: ignore[attr-defined]
        one.step(steps - 1)
        if comm.rank == 2:
            change(one)
        one.exchange(steps - 1)
        return one

    return run_ranks(3, rank)


def skip(rank: Rank) -> None:
    rank.meter.sample = NO_SAMPLE


def overflow(rank: Rank) -> None:
    rank.meter.sample[5] = float("inf")


@pytest.mark.parametrize("change", [skip, overflow])
def test_a_step_that_one_rank_skips_or_overflows_is_not_measured(change: Any) -> None:
    """A scaler skips the step of one rank only. Counted as zeros, it would lower the share."""
    for rank in run_with(change):
        state = rank.optimizer.state[rank.parameters["large"]]
        assert state[SIGNAL] == rank.kept[SIGNAL]  # type: ignore[attr-defined]
        assert state[ENERGY] == rank.kept[ENERGY]  # type: ignore[attr-defined]
        assert not rank.meter.sample.numel(), "a sample is used once"


def test_torch_still_makes_the_state_of_a_parameter_that_had_no_gradient() -> None:
    """Torch takes a state with any entry for one that it has made: an entry of ours ended the next step."""

    def rank(comm: Comm) -> None:
        used, unused = nn.Parameter(torch.zeros(20)), nn.Parameter(torch.zeros(20))
        optimizer = gradsieve.AdamW([used, unused])
        optimizer.for_ranks(comm.size)
        meter = SignalMeter({"used": used, "unused": unused}, optimizer)
        used.grad = torch.ones(20)
        meter.take(0)
        optimizer.step()
        meter.exchange(0, comm)
        assert SIGNAL in optimizer.state[used]
        unused.grad = torch.ones(20)
        optimizer.step()
        assert "exp_avg" in optimizer.state[unused]

    run_ranks(2, rank)


def test_one_rank_measures_nothing() -> None:
    (only,) = run_ranks(1, lambda comm: Rank(comm, dict.fromkeys(SIZES, 1.0)).run(2))
    assert SIGNAL not in only.optimizer.state[only.parameters["large"]]


def trained(comm: Comm, steps: range, state: dict[str, Any] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Train a small model with exchanged updates, on batches that depend on rank and step."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    source = torch.Generator().manual_seed(3)  # not torch's own, which all ranks of this process share
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=source))
    inner = gradsieve.AdamW(model.parameters(), lr=0.01)
    optimizer = gradsieve.DistributedOptimizer(inner, model, exchange="updates", comm=comm)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    return [parameter.detach().clone() for parameter in model.parameters()], saved


def test_a_resumed_run_measures_as_the_uninterrupted_one() -> None:
    def rank(comm: Comm) -> None:
        whole, end = trained(comm, range(12))
        _, half = trained(comm, range(7))
        resumed, again = trained(comm, range(7, 12), half)
        for left, right in zip(whole, resumed, strict=True):
            assert torch.equal(left, right)
        states = [saved["optimizer"]["state"] for saved in (end, again)]
        assert all(SIGNAL in states[0][number] for number in range(4))
        assert all(states[0][number][SIGNAL] == states[1][number][SIGNAL] for number in range(4))

    run_ranks(3, rank)


def test_ranks_of_which_only_some_measure_are_told() -> None:
    def rank(comm: Comm) -> None:
        model = nn.Linear(8, 8)
        kind = torch.optim.NAdam if comm.rank else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.01)
        gradsieve.DistributedOptimizer(optimizer, model, exchange="updates", comm=comm)

    with pytest.raises(gradsieve.MismatchError, match="measuring of the gradients' signal"):
        run_ranks(2, rank)
