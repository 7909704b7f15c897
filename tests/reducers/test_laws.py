"""The laws every reducer obeys, for every number of ranks and every pattern: the library's first test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import REDUCERS
from gradsieve.testing.laws import STEPS, Outcome, check_same_everywhere, check_steps, equal, run_reducer
from gradsieve.testing.patterns import PATTERNS, RUNS, SIZES, Case, run_case, scattered, sparse
from gradsieve.wire import Codec
from gradsieve.wire.values import VALUE_CODES


def run(name: str, case: Case, steps: int = STEPS, **settings: Any) -> list[list[Outcome]]:
    return run_reducer(lambda: REDUCERS[name](**settings), case, steps)


def check_all(name: str, case: Case, tolerance: float = 0.0, **settings: Any) -> None:
    check_steps(REDUCERS[name](**settings), case, run(name, case, **settings), tolerance)


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
    case = Case([scattered(600, torch.randperm(600, generator=generator)[:50], generator) / 3 for _ in range(3)], 50)
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
        locals_.append(scattered(numel, picks, generator))
    return Case(locals_, k)


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", REDUCERS)
@given(case=cases())
def test_laws_hold_on_drawn_cases(name: str, case: Case) -> None:
    check_all(name, case)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@pytest.mark.parametrize("name", REDUCERS)
@given(case=cases())
def test_laws_hold_on_a_thousand_drawn_cases(name: str, case: Case) -> None:
    check_all(name, case)


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [9, 12, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("name", REDUCERS)
def test_laws_hold_for_many_ranks(name: str, size: int, pattern: str) -> None:
    check_all(name, PATTERNS[pattern](size, torch.Generator().manual_seed(size)))
