"""Every compiled kernel against its definition in torch operations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve.kernels import cpu, gaps, kernels, reference, signs, twobits
from gradsieve.kernels import threads as shared_passes

DTYPES = [torch.float32, torch.float64]
NUMELS = [1, 31, 32, 33, 1000, 4099]
SMALL_CHUNK = 4096
LARGE = 2 * SMALL_CHUNK + 77  # enough for two threads to share


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(shared_passes, "CHUNK_ENTRIES", SMALL_CHUNK)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def heavy(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values with zeros, ties, subnormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=dtype) ** 3
    odd = [0.0, -0.0, 1.0, -1.0, 1.0, torch.finfo(dtype).tiny / 4, torch.inf, -torch.inf, torch.nan]
    for value in odd[: numel // 2]:
        x[torch.randint(numel, (1,), generator=generator)] = value
    return x


def picks(numel: int, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values.int()
    return indices, torch.randint(-3, 4, (count,), generator=generator).to(dtype)


def assert_same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("floor", [0.0, 1.0, torch.inf])
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact(dtype: torch.dtype, numel: int, floor: float, threads: int) -> None:
    x = heavy(numel, dtype)
    assert_same(cpu.compact(x, floor, numel), reference.compact(x, floor, numel))
    assert_same(cpu.compact(x, floor, 1), reference.compact(x, floor, 1))


def test_compact_picks_nan_always_and_zero_never() -> None:
    x = torch.tensor([0.0, torch.nan, -0.0, 1e-45, -torch.inf, 3.0])
    assert cpu.compact(x, torch.inf, 6)[0].tolist() == [1, 4]
    assert cpu.compact(x, 0.0, 6)[0].tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds_and_collects(dtype: torch.dtype, numel: int, offset: int, threads: int) -> None:
    # An offset takes the slices off the boundary that streaming stores need.
    residual, grad = heavy(numel + offset, dtype, 1)[offset:], heavy(numel + offset, dtype, 2)[offset:]
    ours, theirs = torch.empty(numel + offset, dtype=dtype)[offset:], torch.empty(numel, dtype=dtype)
    entries = cpu.accumulate(residual, grad, ours, 1.0, numel, False)
    expected = reference.accumulate(residual, grad, theirs, 1.0, numel, False)
    assert_same(ours, theirs)
    assert_same(entries, expected)
    for module in (cpu, reference):
        around = torch.cat([torch.ones(offset, dtype=dtype), grad, torch.ones(1, dtype=dtype)])
        cleared = around[offset:-1]
        assert_same(module.accumulate(residual, cleared, ours, 1.0, numel, True), expected)
        assert_same(ours, theirs)
        assert not cleared.any()
        assert around.sum() == offset + 1  # nothing around it


def test_accumulate_gives_up_collecting_beyond_its_room_but_still_adds() -> None:
    residual, grad, out = torch.ones(10_000), torch.ones(10_000), torch.zeros(10_000)
    assert cpu.accumulate(residual, grad, out, 0.5, 10, True) is None
    assert (out == 2).all()
    assert not grad.any()


def test_accumulate_without_a_floor_only_adds() -> None:
    residual, grad, out = torch.ones(100), torch.ones(100), torch.zeros(100)
    assert cpu.accumulate(residual, grad, out, None, 10, False) is None
    assert (out == 2).all()


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kth_magnitude_and_cut(dtype: torch.dtype, numel: int) -> None:
    x = heavy(numel, dtype)
    indices = torch.arange(numel, dtype=torch.int32)
    for k in {1, numel // 3 + 1, numel - 1 or 1, numel}:
        assert cpu.kth_magnitude(x, k) == reference.kth_magnitude(x, k)
        assert_same(cpu.cut(indices, x, k), reference.cut(indices, x, k))
    assert_same(cpu.cut(indices, x, 0), reference.cut(indices, x, 0))
    assert cpu.least_magnitude(x) == reference.least_magnitude(x)


@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_of_chunks(dtype: torch.dtype, numel: int, threads: int) -> None:
    """Also where the scale jumps from chunk to chunk, so that the floor of one is useless for the next."""
    x = heavy(numel, dtype)
    jumping = x * torch.tensor([1.0, 1e-6, 1e6], dtype=dtype).repeat_interleave(100).repeat(numel // 300 + 1)[:numel]
    sparse = torch.where(torch.arange(numel) % 50 == 7, x, 0)
    for each in (x, jumping, sparse, x.sign().nan_to_num(), torch.zeros(numel, dtype=dtype)):
        for length in {1, 32, 100, 1000, numel}:
            sizes = torch.tensor([min(length, numel - start) for start in range(0, numel, length)])
            for share in (sizes.clamp(max=1), (sizes + 9) // 10, sizes):
                edges = torch.cat([torch.zeros(1, dtype=torch.int64), share.cumsum(0)])
                found = cpu.top_of_chunks(each, length, edges)
                assert_same(found, reference.top_of_chunks(each, length, edges))


def test_a_nan_has_the_largest_magnitude() -> None:
    for module in (cpu, reference):
        assert module.least_magnitude(torch.tensor([torch.nan, -3.0])) == 3
        assert module.least_magnitude(torch.tensor([torch.nan])) == torch.inf


@pytest.mark.parametrize("sizes", [(0,), (5,), (0, 0), (5, 0), (0, 5, 9), (1, 1), (40, 60, 80, 100), (100,) * 9])
@pytest.mark.parametrize("numel", [100, 20_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_runs_exclude_and_above(dtype: torch.dtype, numel: int, sizes: tuple[int, ...]) -> None:
    runs = [picks(numel, size, dtype, seed) for seed, size in enumerate(sizes)]
    assert_same(cpu.sum_runs(runs), reference.sum_runs(runs))
    assert_same(cpu.exclude(runs[0], runs[-1][0]), reference.exclude(runs[0], runs[-1][0]))
    assert_same(cpu.shared(runs[0][0], runs[-1][0]), reference.shared(runs[0][0], runs[-1][0]))
    for floor in (0.0, 2.0, 9.0):
        assert_same(cpu.above(runs[-1], floor), reference.above(runs[-1], floor))
    decoded = runs[0][1].clamp(-1, 2)  # some values have no rounding error
    assert_same(cpu.difference(runs[0], decoded), reference.difference(runs[0], decoded))
    delivered = runs[-1][0]
    assert_same(cpu.difference_at(runs[0], decoded, delivered), reference.difference_at(runs[0], decoded, delivered))


def test_runs_are_added_in_order_since_sums_depend_on_it() -> None:
    index = torch.tensor([7], dtype=torch.int32)
    values = [1e8, 1.0, -1e8, 1.0]
    runs = [(index, torch.tensor([value])) for value in values]
    assert cpu.sum_runs(runs)[1].item() == reference.sum_runs(runs)[1].item() == 1.0
    assert cpu.sum_runs(runs[::-1])[1].item() == reference.sum_runs(runs[::-1])[1].item() == 0.0


def test_sum_runs_keeps_sums_that_cancel_since_they_were_delivered() -> None:
    index = torch.tensor([4], dtype=torch.int32)
    indices, values = cpu.sum_runs([(index, torch.tensor([2.0])), (index, torch.tensor([-2.0]))])
    assert (indices.tolist(), values.tolist()) == ([4], [0.0])


@pytest.mark.parametrize("start", [9_000, 9_002])  # the second is in both runs: a stretch ends before it
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_runs_where_some_stretches_have_one_run_only(dtype: torch.dtype, start: int) -> None:
    """As rounding errors are: one run from everywhere, one from a single region; and runs that do not overlap."""
    everywhere = torch.arange(0, 40_000, 7, dtype=torch.int32)
    region = torch.arange(start, 17_000, 5, dtype=torch.int32)
    beyond = torch.arange(50_000, 60_000, 3, dtype=torch.int32)
    runs = [(indices, torch.randn(indices.numel(), dtype=dtype)) for indices in (region, everywhere, beyond)]
    for found, expected in zip(cpu.sum_runs(runs), reference.sum_runs(runs), strict=True):
        assert_same(found, expected)


def test_sum_runs_does_not_spread_a_nan() -> None:
    a = torch.tensor([1, 5], dtype=torch.int32), torch.tensor([torch.nan, 1.0])
    b = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([1.0, torch.inf])
    assert_same(cpu.sum_runs([a, b])[1], torch.tensor([torch.nan, 1.0, torch.inf]))


@pytest.mark.parametrize("odd", [None, torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite(dtype: torch.dtype, odd: float | None) -> None:
    limits = torch.finfo(dtype)
    x = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny] * 20, dtype=dtype)
    for position in (0, 37, 99):
        y = x.clone()
        if odd is not None:
            y[position] = odd
        assert cpu.all_finite(y) is reference.all_finite(y) is (odd is None)
    assert cpu.all_finite(x[:0]) is True


@pytest.mark.parametrize(
    ("indices", "position"),
    [([], -1), ([3], -1), ([3, 4, 9], -1), ([2, 4], 0), ([3, 3], 1), ([5, 4], 1), ([4, 10], 1), ([-1], 0)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_disorder(dtype: torch.dtype, indices: list[int], position: int) -> None:
    tensor = torch.tensor(indices, dtype=dtype)
    assert cpu.first_disorder(tensor, 3, 10) == position
    assert reference.first_disorder(tensor, 3, 10) == position


@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_and_settle(dtype: torch.dtype, numel: int, threads: int) -> None:
    sent, values = picks(numel, (numel + 1) // 2, dtype, 3)
    leftover = sent[::2].contiguous(), (sent[::2] % 3 + 1).to(dtype)  # the same as sent in a third of the positions
    for name, arguments in {
        "write_sparse_": (sent, values),
        "put_": (sent, values),
        "clear_": (sent,),
        "settle_": ((sent, (sent + 1).to(dtype)), leftover),
    }.items():
        ours, theirs = (torch.arange(numel + 1, dtype=dtype)[1:] for _ in range(2))
        getattr(cpu, name)(ours, *arguments)
        getattr(reference, name)(theirs, *arguments)
        assert_same(ours, theirs)


def test_settle_keeps_leftover_that_this_rank_did_not_send() -> None:
    accumulated = torch.tensor([1.0, 2.0, 3.0])
    sent = torch.tensor([0], dtype=torch.int32), torch.tensor([1.0])
    cpu.settle_(accumulated, sent, (torch.tensor([2]).int(), torch.tensor([5.0])))
    assert accumulated.tolist() == [0.0, 2.0, 8.0]


@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_moments_and_points(dtype: torch.dtype, numel: int, threads: int) -> None:
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    assert_same(cpu.sample(x, 500), reference.sample(x, 500))
    ranks = torch.tensor([0, numel // 2, numel - 1])
    assert_same(cpu.descending_points(x, ranks), reference.descending_points(x, ranks))
    # Both sum in float64; the order differs.
    torch.testing.assert_close(cpu.moments(x), reference.moments(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("indices", [[0], [5], [0, 1, 2], [7, 8, 4000, 4001, 2**31 - 2], list(range(3, 5000, 7))])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gaps_read_back_as_written(dtype: torch.dtype, indices: list[int]) -> None:
    run = torch.tensor(indices, dtype=dtype).numpy()
    for low in (0, indices[0]):
        chosen = gaps.plan(run, low)
        for plan in {chosen, chosen._replace(width=chosen.wide, num_wide=0)}:
            words = np.zeros(plan.num_words(run.size) + 1, np.uint64)
            gaps.encode(run, low, plan.width, plan.wide, words)
            again = np.empty_like(run)
            assert gaps.decode(words, low, 2**31 - 1, *plan, again)
            assert (again == run).all()
            assert words[-1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_to_the_reference(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -3.0, 0.0, 2.0]).to(dtype)
    assert kernels(x) is reference
    (indices, values), _ = kernels(x).cut(torch.arange(4).int(), x, 2)
    assert (indices.tolist(), values.tolist()) == ([1, 3], [-3.0, 2.0])


def test_kernels_stay_within_bounds(tmp_path: Path) -> None:
    """This file again, with every array access of the compiled loops checked."""
    if os.environ.get("NUMBA_BOUNDSCHECK"):
        return
    # A cache of its own: compiled code of an unchecked run would be used otherwise.
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_move_delivered(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([1.0, 0.6, 0.4], dtype=dtype)
    numel = 1000
    start = torch.randn(numel, generator=generator, dtype=dtype)
    squares = torch.rand(numel, generator=generator, dtype=dtype)
    counts = torch.randint(0, 4, (numel,), generator=generator).to(dtype)  # 3 is where counting ends
    indices, values = picks(numel, 300, dtype, 4)
    moved = []
    for module in (cpu, reference):
        state = start.clone(), squares.clone(), counts.clone()
        module.move_delivered_(*state, indices, values, weights, 0.1, 1e-8)
        moved.append(state)
    torch.testing.assert_close(*moved, rtol=0, atol=16 * torch.finfo(dtype).eps)  # numbers of a few units, rounded
    assert moved[0][2].max() == 3
    assert not torch.equal(moved[0][0], start)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1023, 1024, 1025, 5000])
def test_signs_are_the_mean_magnitude_of_their_chunk_with_the_sign_of_each_value(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) ** 3
    num_chunks = -(-count // signs.CHUNK_VALUES)
    steps, masks = np.empty(num_chunks, np.float32), np.zeros(-(-count // 32), np.uint32)
    decoded, added = np.empty_like(values), values.copy()
    assert signs.encode(values, steps, masks)
    signs.decode(steps, masks, decoded)
    signs.add(steps, masks, added)
    chunks = [values[at : at + signs.CHUNK_VALUES] for at in range(0, count, signs.CHUNK_VALUES)]
    means = np.array([np.abs(chunk.astype(np.float64)).mean() for chunk in chunks])
    np.testing.assert_allclose(steps, means, rtol=1e-6)
    each = np.repeat(steps, signs.CHUNK_VALUES)[:count]
    assert (decoded == np.where(values < 0, -each, each)).all()
    assert (added == values + decoded).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_signs_of_what_is_not_finite_are_refused(position: int, bad: float) -> None:
    values = np.ones(3000, np.float32)
    values[position] = bad
    assert not signs.encode(values, np.empty(3, np.float32), np.zeros(94, np.uint32))


def test_signs_of_zeros_are_zeros_none_of_them_negative() -> None:
    values = np.full(40, -0.0, np.float32)
    steps, masks = np.empty(1, np.float32), np.zeros(2, np.uint32)
    assert signs.encode(values, steps, masks)
    decoded = np.empty_like(values)
    signs.decode(steps, masks, decoded)
    assert not np.signbit(decoded).any()


@pytest.mark.parametrize("count", [1, 31, 32, 33, 255, 256, 257, 5000])
def test_two_bits_are_the_means_below_and_above_the_mean_with_the_sign_of_each_value(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) ** 3
    num_chunks = -(-count // twobits.CHUNK_VALUES)
    levels, codes = np.empty(2 * num_chunks, np.float32), np.zeros(-(-count // 32), np.uint64)
    decoded = np.full(count + 1, 7, np.float32)
    assert twobits.encode(values, levels, codes)
    twobits.decode(levels, codes, decoded[:-1])
    assert decoded[-1] == 7
    for start in range(0, count, twobits.CHUNK_VALUES):
        chunk, seen = values[start : start + twobits.CHUNK_VALUES], decoded[:-1][start : start + twobits.CHUNK_VALUES]
        magnitudes = np.abs(chunk.astype(np.float64))
        large = magnitudes >= np.float32(magnitudes.mean())
        expected = np.where(large, magnitudes[large].mean(), 0 if large.all() else magnitudes[~large].mean())
        np.testing.assert_allclose(seen, np.copysign(expected, chunk), rtol=1e-6)
        assert set(np.abs(seen)) <= set(levels[2 * start // twobits.CHUNK_VALUES :][:2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 700, 1299])
def test_two_bits_of_what_is_not_finite_are_refused(position: int, bad: float) -> None:
    values = np.ones(1300, np.float32)
    values[position] = bad
    assert not twobits.encode(values, np.empty(12, np.float32), np.zeros(41, np.uint64))
