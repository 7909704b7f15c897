"""Vectors of consecutive entries: whatever is done with them, they give what the same vector with indices gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import InputError, SparseVector
from gradsieve.feedback import MomentumResidual, Residual
from gradsieve.vector import Chain, Difference, Rounding, add
from gradsieve.vector.pieces import Pieces
from gradsieve.wire import Codec
from gradsieve.wire.message import Expected, unpack
from gradsieve.wire.signed import Signed

NUMEL = 20


def run(start: int, stop: int, seed: int = 0, numel: int = NUMEL) -> SparseVector:
    """Whole numbers, zeros among them: sums and differences are exact."""
    values = torch.randint(-4, 5, (stop - start,), generator=torch.Generator().manual_seed(seed)).float()
    return SparseVector.run(values, start, numel)


def indexed(vector: SparseVector) -> SparseVector:
    return SparseVector(vector.indices.clone(), vector.values.clone(), vector.numel)


def rounded(vector: SparseVector) -> Rounding:
    return Rounding(vector, vector.with_values([vector.values + 1]))


def written(vector: SparseVector, how: str) -> Tensor:
    dense = torch.full((vector.numel,), 7.0)
    getattr(vector, how)(dense)
    return dense


def same(a: SparseVector, b: SparseVector) -> bool:
    return a.numel == b.numel and torch.equal(a.indices, b.indices) and torch.equal(a.values, b.values)


def test_a_run_holds_no_indices_and_no_copy() -> None:
    values = torch.ones(3)
    vector = SparseVector.run(values, 4, 10)
    assert vector.values is values
    assert vector._indices is None
    assert (vector.is_run, vector.is_full, vector.nnz, vector.span, vector.extent) == (True, False, 3, (4, 7), (4, 7))
    assert (vector.indices.tolist(), vector.indices.dtype) == ([4, 5, 6], torch.int32)
    assert (indexed(vector).is_run, indexed(vector).span, indexed(vector).extent) == (False, (0, 10), (4, 7))
    assert SparseVector.full(values).is_full


@pytest.mark.parametrize(("start", "count"), [(-1, 3), (8, 3), (0, 11), (11, 0)])
def test_runs_that_are_not_in_the_vector_are_refused(start: int, count: int) -> None:
    with pytest.raises(InputError, match=rf"a run must be in \[0, 10\), got shape \({count},\) starting at {start}"):
        SparseVector.run(torch.ones(count), start, 10)


OPERATIONS: dict[str, Callable[[SparseVector], SparseVector]] = {
    "top": lambda v: v.top(3)[0],
    "above": lambda v: v.above(2.0),
    "without": lambda v: v.without(run(6, 9)),
    "without nothing of it": lambda v: v.without(run(15, 20)),
    "without all": lambda v: v.without(run(0, 20)),
    "undelivered": lambda v: rounded(v).undelivered(run(6, 9)),
    "undelivered in part": lambda v: rounded(v).undelivered(indexed(run(6, 9))),
    "undelivered of all": lambda v: rounded(v).undelivered(run(0, 20)),
    "with other values": lambda v: v.with_values([v.values[:2] * 2, v.values[2:]]),
    "its sum": lambda v: add([v, v, v]),
    "sum with a longer run": lambda v: add([v, run(2, 14, 3)]),
    "sum with indices": lambda v: add([v, indexed(run(2, 14, 3))]),
    "joined again": lambda v: SparseVector.concatenate(v.split([0, 6, 6, 9, 20])),
    "joined with a gap": lambda v: SparseVector.concatenate([v, run(15, 17, 4)]),
    "joined with indices": lambda v: SparseVector.concatenate([v, indexed(run(12, 17, 4))]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_with_indices(name: str) -> None:
    vector = run(5, 12, 1)
    assert same(OPERATIONS[name](vector), OPERATIONS[name](indexed(vector)))


@pytest.mark.parametrize("how", ["write_to_", "put_in_"])
def test_runs_are_written_as_indices_are(how: str) -> None:
    for start, stop in ((0, 20), (0, 5), (5, 12), (15, 20), (4, 4)):
        vector = run(start, stop, 2)
        assert torch.equal(written(vector, how), written(indexed(vector), how))
        assert torch.equal(vector.to_dense(), indexed(vector).to_dense())
    chain = SparseVector.concatenate(run(5, 12, 1).split([5, 7, 12]))
    assert isinstance(chain, Chain)
    assert torch.equal(written(chain, how), written(run(5, 12, 1), how))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.integers(0, 20), min_size=1, max_size=6).map(sorted),
)
def test_parts_of_runs_are_runs_and_the_same_as_with_indices(first: int, second: int, inner: list[int]) -> None:
    vector = run(min(first, second), max(first, second), 5)
    bounds = [0, *inner, NUMEL]
    parts, expected = vector.split(bounds), indexed(vector).split(bounds)
    assert all(part.is_run and same(part, other) for part, other in zip(parts, expected, strict=True))
    joined = SparseVector.concatenate(parts)
    assert joined.is_run
    assert same(joined, vector)


def test_consecutive_runs_are_joined_only_when_asked_for() -> None:
    parts = run(5, 12, 1).split([5, 8, 12])
    chain = SparseVector.concatenate(parts)
    assert isinstance(chain, Chain)
    assert (chain.span, chain.nnz, list(chain.blocks)) == ((5, 12), 7, parts)
    assert "_made" not in chain.__dict__
    assert torch.equal(chain.values, run(5, 12, 1).values)


def test_the_sum_of_equal_runs_is_a_run_in_the_order_given() -> None:
    values = [torch.tensor([1e8, 1.0]), torch.tensor([-1e8, 1.0]), torch.tensor([1.0, 1.0])]
    vectors = [SparseVector.run(value, 3, 10) for value in values]
    assert add(vectors).is_run
    assert add(vectors).values.tolist() == [1.0, 3.0]
    assert add(reversed(vectors)).values.tolist() == [0.0, 3.0]  # 1 - 1e8 is -1e8 in float32


def test_the_rounding_error_of_a_run_is_a_difference() -> None:
    vector = run(5, 12, 1)
    decoded = vector.with_values([vector.values.round() + 0.25])
    error = Rounding(vector, decoded).error
    assert isinstance(error, Difference)
    assert error.span == vector.span
    assert torch.equal(decoded.values + error.values, vector.values)
    assert Rounding.none(vector).error.nnz == 0


@pytest.mark.parametrize("feedback", [Residual(), MomentumResidual(0.5)])
@pytest.mark.parametrize("kept", ["rounding", "nothing", "another run", "indices"])
def test_settling_a_run_is_settling_its_indices(kept: str, feedback: Residual | MomentumResidual) -> None:
    """Also if the run lies in the accumulated vector itself, as the window does."""
    states = []
    for with_indices in (False, True):
        out = Pieces([run(0, NUMEL, 8).values])
        state = feedback.init(out)
        accumulated, *_ = feedback.accumulate(out, out, state, None, 0)
        sent = SparseVector.run(accumulated[5:12], 5, NUMEL)
        decoded = sent.with_values([torch.full((3,), 1.5), torch.full((4,), -0.5)])
        leftover = {
            "rounding": SparseVector.concatenate(
                [Rounding(*parts).error for parts in zip(sent.split([5, 8, 12]), decoded.blocks, strict=True)]
            ),
            "nothing": SparseVector.empty(NUMEL, accumulated),
            "another run": run(7, 9, 3),
            "indices": SparseVector(torch.tensor([5, 11]), torch.tensor([0.5, -0.25]), NUMEL),
        }[kept]
        if with_indices:
            sent, leftover = indexed(sent), indexed(leftover)
        states.append(feedback.settle(accumulated, out, sent, leftover, state))
    assert all(torch.equal(a, b) for a, b in zip(*(feedback.vectors(s).values() for s in states), strict=True))
    assert not torch.equal(states[0].residual[5:12], run(0, NUMEL, 8).values[5:12])
    assert torch.equal(states[0].residual[12:], run(0, NUMEL, 8).values[12:])


@pytest.mark.parametrize("lengths", [[20], [3, 17], [6, 1, 2, 11], [12, 8]])
@pytest.mark.parametrize("clear", [False, True])
def test_the_mean_of_a_run_is_written_to_pieces(lengths: list[int], clear: bool) -> None:
    whole = SparseVector.concatenate(run(5, 12, 1).split([5, 7, 12]))
    for total in (whole, run(5, 12, 1), SparseVector.full(run(0, 20, 1).values), run(0, 2, 1)):
        parts = [torch.zeros(n) if clear else torch.full((n,), 9.0) for n in lengths]
        pieces = Pieces(parts)
        pieces.write_mean_(total, 4, is_clear=clear)
        assert torch.equal(torch.cat(parts), indexed(total).to_dense() / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 5, 20])
def test_a_sum_of_runs_is_the_sum_with_indices_bit_for_bit(count: int, dtype: torch.dtype) -> None:
    """Also of negative zeros, and over several blocks: ranks that add the same in either way must not drift apart."""
    generator, numel = torch.Generator().manual_seed(count), 300_000
    parts = [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    for part in parts:
        part[7] = -0.0
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    summed = add(SparseVector.run(part, 0, numel) for part in parts)
    with_indices = add(SparseVector(torch.arange(numel), part, numel) for part in parts)
    assert torch.equal(summed.values.view(bits), with_indices.values.view(bits))


@pytest.mark.parametrize("count", [1, 40, 1024, 5000, 300_001])
def test_signs_are_decoded_to_where_they_are_needed(count: int) -> None:
    """Each way gives what the decoded values give, bit for bit."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    sent, numel = SparseVector.run(values, 3, count + 5), count + 5
    expected = Expected(rank=0, numel=numel, k=1, dtype=torch.float32, device=torch.device("cpu"))
    packed = Codec("sign").pack(sent, expected, 3)
    arrived = unpack(packed.message, expected, 3, numel, source=1).vector
    assert isinstance(packed.rounding.decoded, Signed)
    assert isinstance(arrived, Signed)
    decoded = SparseVector.run(arrived.values.clone(), 3, numel)
    fresh = unpack(packed.message, expected, 3, numel, source=1).vector
    assert same(packed.rounding.decoded, decoded)
    assert torch.equal(written(fresh, "put_in_"), written(decoded, "put_in_"))
    error = SparseVector.run(values - decoded.values, 3, numel)
    for arrived in (fresh, decoded):
        assert torch.equal(written(Rounding(sent, arrived).error, "put_in_"), written(error, "put_in_"))
        assert same(Rounding(sent, arrived).error, error)
    assert torch.equal(add([sent, fresh, fresh]).values, add([sent, decoded, decoded]).values)
    assert torch.equal(add([fresh, sent]).values, add([decoded, sent]).values)
    for lengths in ([numel], [2, numel - 2], [min(count, 3) + 1, numel - min(count, 3) - 1]):
        means = []
        for total in (fresh, decoded):
            parts = [torch.full((length,), 9.0) for length in lengths]
            Pieces(parts).write_mean_(total, 3)
            means.append(torch.cat(parts))
        assert torch.equal(*means)
    assert fresh.all_finite()
