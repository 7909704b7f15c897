"""The laws again, on many more drawn cases and more ranks: minutes, run by `make check-long`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from gradsieve import REDUCERS
from gradsieve.testing.patterns import PATTERNS, Case
from test_laws import cases, check_all

pytestmark = pytest.mark.long


@settings(max_examples=1000, deadline=None)
@pytest.mark.parametrize("name", REDUCERS)
@given(case=cases())
def test_laws_hold_on_a_thousand_drawn_cases(name: str, case: Case) -> None:
    check_all(name, case)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [9, 12, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("name", REDUCERS)
def test_laws_hold_for_many_ranks(name: str, size: int, pattern: str) -> None:
    check_all(name, PATTERNS[pattern](size, torch.Generator().manual_seed(size)))
