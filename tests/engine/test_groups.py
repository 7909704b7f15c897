"""Which parameters go sparse, and how they are cut into fixed groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import InputError, Rules
from gradsieve.engine.groups import cut_into_groups

MATRIX = (64, 64)  # 16 KiB of float32


def parameters(**shapes: Any) -> dict[str, Tensor]:
    return {
        name.replace("__", "."): torch.empty(shape) if isinstance(shape, tuple) else shape
        for name, shape in shapes.items()
    }


def names(groups: Any) -> list[tuple[str, ...]]:
    return [group.names for group in groups]


def test_sparse_groups_run_backwards_and_dense_ones_come_last() -> None:
    model = parameters(a=MATRIX, a_bias=(64,), b=MATRIX, b_bias=(64,), c=MATRIX, small=(4, 4))
    groups = cut_into_groups(model, Rules(), None)
    assert names(groups) == [("c", "b", "a"), ("small", "b_bias", "a_bias")]
    assert [(slot.start, slot.stop) for slot in groups[0].slots] == [(0, 4096), (4096, 8192), (8192, 12288)]
    assert [group.sparse for group in groups] == [True, False]


@pytest.mark.parametrize(
    ("group_mb", "expected"),
    [
        (1 / 64, [("d",), ("c",), ("b",), ("a",)]),
        (2 / 64, [("d", "c"), ("b", "a")]),
        (3 / 64, [("d", "c", "b"), ("a",)]),
        (1e-9, [("d",), ("c",), ("b",), ("a",)]),
        (1.0, [("d", "c", "b", "a")]),
    ],
)
def test_a_group_is_closed_before_it_grows_too_large(group_mb: float, expected: list[tuple[str, ...]]) -> None:
    assert names(cut_into_groups(parameters(a=MATRIX, b=MATRIX, c=MATRIX, d=MATRIX), Rules(), group_mb)) == expected


def test_dtypes_and_densities_are_not_mixed() -> None:
    model = parameters(
        a=MATRIX,
        b=torch.empty(MATRIX, dtype=torch.bfloat16),
        c=MATRIX,
        d=MATRIX,
        norm=torch.empty(9).bfloat16(),
        bias=(3,),
    )
    groups = cut_into_groups(model, Rules(density=(("c", 0.5),)), None)
    # Ordered by the parameter that backward reaches last: then the group is complete.
    assert names(groups) == [("c",), ("b",), ("d", "a"), ("bias",), ("norm",)]
    assert [group.density for group in groups] == [0.5, None, None, None, None]


def test_names_overrule_shapes() -> None:
    rules = Rules(include=("*.bias", "tiny"), exclude=("head.*",), density=(("embedding.*", 0.1), ("*", 0.3)))
    assert rules.keeps_dense("head.bias", (9,))
    assert rules.keeps_dense("head.weight", (900, 900))
    assert not rules.keeps_dense("body.bias", (9,))
    assert rules.density_of("embedding.weight") == 0.1
    assert rules.density_of("body.weight") == 0.3
    assert Rules().keeps_dense("body.bias", (100_000,))
    assert Rules().keeps_dense("small", (45, 45))
    assert not Rules().keeps_dense("large", (46, 46))
    assert not Rules(min_dimensions=1, min_numel=0).keeps_dense("body.bias", (9,))


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"include": "bias"}, "include must be a list of patterns, got the single text 'bias'"),
        ({"density": (("a", 2.0),)}, r"density of 'a' must be in \(0, 1\], got 2.0"),
        ({"min_numel": -1}, "must not be negative, got -1 and 2"),
    ],
)
def test_bad_rules_are_refused(settings: dict[str, Any], pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        Rules(**settings)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"pattern 'x\*' matches no parameter; their names are a, b, c, ..."):
        cut_into_groups(parameters(a=MATRIX, b=MATRIX, c=MATRIX, d=MATRIX), Rules(exclude=("x*",)), None)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="parameter a must be floating point to be exchanged, got torch.complex64"):
        cut_into_groups(parameters(a=torch.empty(MATRIX, dtype=torch.complex64)), Rules(), None)
