"""Densities as training goes on."""

from __future__ import annotations

from typing import Any

import pytest

from gradsieve import Constant, Exponential, InputError, Schedule, Steps
from gradsieve.engine.schedules import as_schedule


def test_dense_steps_come_first() -> None:
    assert [Constant(0.1, dense_steps=2).density_at(step) for step in range(4)] == [None, None, 0.1, 0.1]


def test_a_list_of_densities_ends_with_the_last() -> None:
    schedule = Steps([0.25, 0.0625, 0.01], every=2, dense_steps=1)
    assert [schedule.density_at(step) for step in range(8)] == [None, 0.25, 0.25, 0.0625, 0.0625, 0.01, 0.01, 0.01]
    assert schedule == Steps((0.25, 0.0625, 0.01), every=2, dense_steps=1)


def test_an_exponential_ramp_falls_by_the_same_factor() -> None:
    schedule = Exponential(0.16, 0.01, 4)
    assert [schedule.density_at(step) for step in range(6)] == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01])


def test_a_number_is_a_schedule() -> None:
    assert as_schedule(1) == Constant(1.0)
    assert str(as_schedule(0.01)) == "0.01"
    assert str(Constant(0.01, 5)) == "Constant(density=0.01, dense_steps=5)"


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: Constant(0.0), r"density must be in \(0, 1\], got 0.0"),
        (lambda: Constant(float("nan")), r"density must be in \(0, 1\], got nan"),
        (lambda: Constant(0.1, -1), "dense_steps must be at least 0, got -1"),
        (lambda: Steps((), 5), "densities must have at least one entry"),
        (lambda: Steps((0.1, 2.0), 5), r"density must be in \(0, 1\], got 2.0"),
        (lambda: Steps((0.1,), 0), "every must be at least 1, got 0"),
        (lambda: Exponential(0.1, 0.01, 0), "steps must be at least 1, got 0"),
        (lambda: as_schedule(True), "density must be a number"),
    ],
)
def test_bad_schedules_are_refused(make: Any, pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        make()


def test_a_schedule_of_ones_own() -> None:
    class Sawtooth(Schedule):
        dense_steps = 1

        def sparse_density_at(self, step: int) -> float:
            return 0.1 if step % 2 else 0.2

    assert [Sawtooth().density_at(step) for step in range(4)] == [None, 0.2, 0.1, 0.2]
