"""The recipe onebit: its bytes, what ranks agree on, and that nothing is lost. Ranks as threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import CountingComm, recipe, sparse_allreduce
from gradsieve.comm import FRAME_BYTES, Comm
from gradsieve.reducers.cost import run_words
from gradsieve.testing import run_ranks
from gradsieve.wire import OVERHEAD_BYTES

NUMEL = 5000
SIZES = range(1, 9)


def gradient(rank: int, step: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("density", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_replicas_get_the_same_bits(size: int, density: float) -> None:
    def rank(comm: Comm) -> list[Tensor]:
        state, means = None, []
        for step in range(20):
            mean, state = sparse_allreduce(gradient(comm.rank, step), "onebit", density=density, comm=comm, state=state)
            means.append(mean.view(torch.int32))
        return means

    results = run_ranks(size, rank)
    for means in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(means, results[0], strict=True))
    for step in range(20):  # two magnitudes a chunk of a region, and no others: one bit was sent
        magnitudes = (results[0][step] & 0x7FFFFFFF).unique()
        assert 1 <= magnitudes.numel() <= 1 + size * -(-NUMEL // size // 1024)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [1.0, 0.4])
def test_what_went_in_was_delivered_or_is_residual(size: int, density: float) -> None:
    """In float64, where a value less a float32 step is exact but for the last of 52 bits."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        state, given, delivered = None, torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step in range(7):
            grad = gradient(comm.rank, step, dtype=torch.float64)
            mean, state = sparse_allreduce(grad, "onebit", density=density, comm=comm, state=state)
            given += grad
            delivered += mean * comm.size
        return given, delivered, state.feedback.residual

    results = run_ranks(size, rank)
    given, residual = (sum(result[part] for result in results) for part in (0, 2))
    torch.testing.assert_close(results[0][1] + residual, given, rtol=0, atol=1e-12)
    assert all(result[2].any() for result in results)


@pytest.mark.parametrize("size", [2, 4])
def test_what_has_one_magnitude_is_delivered_exactly(size: int) -> None:
    """Signs of 3 on the way to the owners; sums of them are even again where all ranks agree on the signs."""
    signs = gradient(0, 0).sign() * 3

    def rank(comm: Comm) -> None:
        state = None
        for step in range(4):
            mean, state = sparse_allreduce(signs, "onebit", density=0.5, comm=comm, state=state)
            half = slice(0, NUMEL // 2) if step % 2 == 0 else slice(NUMEL // 2, NUMEL)
            times = 1 if step == 0 else 2  # the second half has waited for a step; then either has
            assert torch.equal(mean[half], times * signs[half])
            assert mean.count_nonzero() == NUMEL // 2
            assert not state.feedback.residual[half].any()

    run_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bytes_are_a_bit_for_each_entry_both_ways(size: int) -> None:
    numel, k = 800_000, 400_000

    def rank(comm: Comm) -> int:
        counting = CountingComm(comm)
        _, state = sparse_allreduce(gradient(comm.rank, 0, numel), "onebit", density=0.5, comm=counting)
        counting.reset()
        sparse_allreduce(gradient(comm.rank, 1, numel), "onebit", density=0.5, comm=counting, state=state)
        return counting.traffic.bytes_received

    bits = 4 * run_words(size, k, bits=1)
    assert bits == 2 * k / 8 * (size - 1) / size
    headers = 2 * (size - 1) * (OVERHEAD_BYTES + FRAME_BYTES + 16)  # the step and the signs fill whole words
    for received in run_ranks(size, rank):
        assert bits < received <= bits + headers


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [0, 1234, NUMEL - 1])
@pytest.mark.parametrize("culprit", [0, 2])
def test_what_is_not_finite_anywhere_is_told_to_all_in_the_same_step(culprit: int, position: int, bad: float) -> None:
    def rank(comm: Comm) -> None:
        state = None
        for step in range(5):
            grad = gradient(comm.rank, step)
            broken = step in (1, 2)
            if broken and comm.rank == culprit:
                grad[position] = bad
            mean, after = sparse_allreduce(grad, "onebit", density=0.3, comm=comm, state=state)
            assert torch.isfinite(mean).all() != broken
            assert (after is state) == broken
            state = after
        assert state.selector.position == 3 * NUMEL // 4  # windows of skipped steps come again
        assert torch.isfinite(state.feedback.residual).all()

    run_ranks(3, rank)


@pytest.mark.parametrize("values", ["sign", "int4", "bf16", "exact"])
def test_a_gradient_that_stays_arrives_in_the_end(values: str) -> None:
    """On average what was delivered comes near it, whatever the code: rounding errors are sent later."""
    chosen, steps = recipe("onebit", values=values), 120

    def rank(comm: Comm) -> Tensor:
        state, delivered = None, torch.zeros(NUMEL)
        for _ in range(steps):
            mean, state = sparse_allreduce(gradient(comm.rank, 0), chosen, density=0.5, comm=comm, state=state)
            delivered += mean
        return delivered / steps

    wanted = sum(gradient(rank, 0) for rank in range(4)) / 4
    # The error is a residual over the number of steps: 0.12 for signs; signs without feedback would leave 0.6.
    assert (run_ranks(4, rank)[0] - wanted).norm() < 0.15 * wanted.norm()
