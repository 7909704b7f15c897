"""The laws every reducer obeys, for every number of ranks and every pattern: the library's first test."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import REDUCERS, CountingComm, SparseVector
from gradsieve.comm import FRAME_BYTES, Comm, Traffic
from gradsieve.reducers.cost import COSTS
from gradsieve.testing import run_ranks
from gradsieve.wire import OVERHEAD_BYTES, Codec
from gradsieve.wire.values import VALUE_CODES
from patterns import PATTERNS, RUNS, SIZES, Case, place, run_case, sparse

PADDING_BYTES = 24  # indices, values and note of a packet each fill whole words
STEPS = 3  # the second and third step reuse what the first has found


class Outcome(NamedTuple):
    """One rank's step."""

    local: SparseVector
    total: SparseVector
    leftover: SparseVector
    traffic: Traffic


def run(name: str, case: Case, steps: int = STEPS, **settings: Any) -> list[list[Outcome]]:
    """Outcomes by step and rank; the state makes a round trip through pickle between steps."""

    def rank(comm: Comm) -> list[Outcome]:
        counting = CountingComm(comm)
        reducer = REDUCERS[name](**settings)
        state = reducer.init(case.numel, counting)
        local = case.local(comm.rank)
        outcomes = []
        for _ in range(steps):
            counting.reset()
            (total, leftover), state = reducer(local, case.k, state, counting)
            state = pickle.loads(pickle.dumps(state))
            outcomes.append(Outcome(local, total, leftover, counting.traffic))
        return outcomes

    by_rank = run_ranks(len(case.locals), rank)
    return [[outcomes[step] for outcomes in by_rank] for step in range(steps)]


def equal(a: SparseVector, b: SparseVector) -> bool:
    """Bit for bit, signs of zero included."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[a.values.dtype]
    return torch.equal(a.indices, b.indices) and torch.equal(a.values.view(bits), b.values.view(bits))


def check_same_everywhere(ranks: list[Outcome]) -> None:
    assert all(equal(outcome.total, ranks[0].total) for outcome in ranks)


def check_nothing_lost(ranks: list[Outcome], tolerance: float) -> None:
    sent = sum(outcome.local.to_dense() for outcome in ranks)
    kept = sum(outcome.leftover.to_dense() for outcome in ranks) + ranks[0].total.to_dense()
    torch.testing.assert_close(kept, sent, rtol=tolerance, atol=tolerance)


def check_well_formed(vector: SparseVector) -> None:
    SparseVector(vector.indices, vector.values, vector.numel)
    assert torch.isfinite(vector.values).all()


def check_cost(name: str, case: Case, ranks: list[Outcome]) -> None:
    cost = COSTS[name](len(ranks), case.k, case.numel)
    for outcome in ranks:
        value_bytes = outcome.local.values.element_size()
        overhead = cost.packets * (OVERHEAD_BYTES + PADDING_BYTES) + cost.messages * FRAME_BYTES
        allowed = (cost.words_limit + cost.control_words) * value_bytes + overhead  # exact for float32
        assert outcome.traffic.messages_received <= cost.messages
        assert outcome.traffic.bytes_received <= allowed


def check_all(name: str, case: Case, tolerance: float = 0.0, **settings: Any) -> None:
    steps = run(name, case, **settings)
    for ranks in steps:
        check_same_everywhere(ranks)
        if REDUCERS[name].conserving:
            check_nothing_lost(ranks, tolerance)
        for outcome in ranks:
            check_well_formed(outcome.total)
            check_well_formed(outcome.leftover)
        check_cost(name, case, ranks)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REDUCERS)
def test_laws_hold_exactly_on_whole_numbers(name: str, size: int, pattern: str) -> None:
    case = PATTERNS[pattern](size, torch.Generator().manual_seed(size))
    check_all(name, case)
    if case.k == case.numel:
        for ranks in run(name, case):
            assert torch.equal(ranks[0].total.to_dense(), sum(case.locals))
            assert all(not outcome.leftover.values.any() for outcome in ranks)
            if name != "gtopk_paper":
                assert all(outcome.leftover.nnz == 0 for outcome in ranks)


SENDING = [name for name in REDUCERS if name != "dense"]


@pytest.mark.parametrize("size", [2, 5, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3, 4, 6, 7, 8))])
@pytest.mark.parametrize("values", [name for name in VALUE_CODES if name != "exact"])
@pytest.mark.parametrize("name", SENDING)
def test_laws_hold_whatever_is_rounded_away(name: str, values: str, size: int) -> None:
    """Whole numbers in float64; a float32 times a small number leaves a remainder that float64 holds exactly."""
    for pattern in PATTERNS.values():
        case = pattern(size, torch.Generator().manual_seed(size))
        check_all(name, case, tolerance=1e-12, codec=Codec(values=values))


@pytest.mark.parametrize("window", RUNS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SENDING)  # dense overwrites a full vector
def test_laws_hold_for_runs(name: str, size: int, window: str) -> None:
    check_all(name, run_case(size, *RUNS[window], torch.Generator().manual_seed(size)))


@pytest.mark.parametrize("window", RUNS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", ["sign", "twobit", "int4", "bf16"])
def test_regions_of_runs_stay_runs_and_keep_what_is_rounded_away(values: str, size: int, window: str) -> None:
    """Without index arrays: total and leftover are the window, and the law holds coordinate by coordinate."""
    case = run_case(size, *RUNS[window], torch.Generator().manual_seed(size))
    for dense in case.locals:
        dense /= 3
    check_all("topkdsa", case, tolerance=1e-12, codec=Codec(values=values))
    for outcome in run("topkdsa", case, 1, codec=Codec(values=values))[0]:
        assert outcome.total.is_run
        assert outcome.total.span == case.window
        if case.k >= size:  # an owner of nothing rounds nothing
            assert outcome.leftover.is_run
            assert outcome.leftover.span == case.window
        assert outcome.leftover.values.any()


@pytest.mark.parametrize("values", ["bf16", "int8", "int4", "sign", "twobit"])
@pytest.mark.parametrize("name", SENDING)
def test_rounding_leaves_something_over(name: str, values: str) -> None:
    """Or the test above would prove nothing."""
    generator = torch.Generator().manual_seed(1)
    case = Case([place(600, torch.randperm(600, generator=generator)[:50], generator) / 3 for _ in range(3)], 50)
    exact, rounded = run(name, case, 1)[0], run(name, case, 1, codec=Codec(values=values))[0]
    assert not equal(exact[0].total, rounded[0].total)
    check_same_everywhere(rounded)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", REDUCERS)
def test_laws_hold_to_rounding_on_random_float32(name: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    dense = [torch.randn(5000, generator=generator) ** 3 for _ in range(size)]
    case = Case([sparse(x).top(100)[0].to_dense() for x in dense], 100)
    # At most 8 float32 values of at most about 50 are added: a handful of roundings of 2^-24 relative.
    check_all(name, case, tolerance=2e-5)


@pytest.mark.parametrize("name", REDUCERS)
def test_the_same_input_gives_the_same_output_and_is_not_changed(name: str) -> None:
    case = PATTERNS["overlapping"](5, torch.Generator().manual_seed(1))
    before = [dense.clone() for dense in case.locals]
    first, second = run(name, case), run(name, case)
    for a, b in zip(first, second, strict=True):
        assert all(equal(x.total, y.total) and equal(x.leftover, y.leftover) for x, y in zip(a, b, strict=True))
    for ranks in first:
        for rank, outcome in enumerate(ranks):
            assert equal(outcome.local, sparse(before[rank]))


@pytest.mark.parametrize("name", REDUCERS)
def test_a_nan_on_one_rank_reaches_every_rank(name: str) -> None:
    case = PATTERNS["overlapping"](5, torch.Generator().manual_seed(2))
    case.locals[3][7] = torch.nan
    case.locals[1][8] = torch.inf
    for ranks in run(name, case):
        for outcome in ranks:
            assert not torch.isfinite(outcome.total.values).all()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any number of ranks, any length, any picks of at most k entries."""
    size = draw(st.integers(1, 8))
    numel = draw(st.integers(1, 80))
    k = draw(st.integers(1, numel))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    stretch = draw(st.sampled_from([numel, max(1, numel // 8)]))
    locals_ = []
    for _ in range(size):
        count = min(draw(st.integers(0, k)), stretch)
        start = draw(st.integers(0, numel - stretch))
        picks = start + torch.randperm(stretch, generator=generator)[:count]
        locals_.append(place(numel, picks, generator))
    return Case(locals_, k)


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", REDUCERS)
@given(case=cases())
def test_laws_hold_on_drawn_cases(name: str, case: Case) -> None:
    check_all(name, case)
