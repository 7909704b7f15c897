"""Front ends clip at the limit for a rank's own gradient where updates are exchanged, and at the user's elsewhere."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradsieve.integrations.clipping import multiply_limits, restore_limits
from support.torchrun import launch

LIMIT = 0.5  # of `clip_job`
FACTORS = {"updates": math.sqrt(2), "gradients": 1.0}
METHODS = {"clip": "limit", "clip_optimizer": "value"}


class Framework:
    """Clips as frameworks do, and returns what it was told."""

    def clip(self, parameters: Any, limit: float, norm_type: int = 2) -> tuple[int, float, int]:
        return len(list(parameters)), limit, norm_type

    def clip_optimizer(self, optimizer: Any, value: float = 0.0) -> float:
        return value


def fake(factor: float = 3.0) -> tuple[Any, nn.Module]:
    """A sieve, as far as clipping is concerned, and its model."""
    model = nn.Linear(3, 2)
    sieve: Any = SimpleNamespace(clip_factor=factor, parameters=tuple(model.parameters()))
    return sieve, model


def test_limits_are_multiplied_and_restored() -> None:
    framework, (sieve, model) = Framework(), fake()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    multiply_limits(framework, METHODS, sieve)
    multiply_limits(framework, METHODS, sieve)  # once more is harmless
    assert framework.clip(model.parameters(), 2.0) == (2, 6.0, 2)
    assert framework.clip(model.parameters(), limit=2.0, norm_type=1) == (2, 6.0, 1)
    assert framework.clip(model.weight, 2.0) == (1, 6.0, 2)
    assert framework.clip_optimizer(optimizer, 2.0) == 6.0
    assert framework.clip_optimizer(optimizer) == 0.0
    assert framework.clip(model.parameters(), math.inf)[1] == math.inf
    restore_limits(framework, METHODS, sieve)
    restore_limits(framework, METHODS, sieve)
    assert not vars(framework)
    assert framework.clip(model.parameters(), 2.0) == (2, 2.0, 2)


def test_only_parameters_of_the_sieve_are_concerned() -> None:
    framework, (first, one), (second, two) = Framework(), fake(3.0), fake(5.0)
    for sieve in (first, second):
        multiply_limits(framework, METHODS, sieve)
    assert framework.clip(one.parameters(), 2.0)[1] == 6.0
    assert framework.clip(two.parameters(), 2.0)[1] == 10.0
    assert framework.clip(nn.Linear(2, 2).parameters(), 2.0)[1] == 2.0
    restore_limits(framework, METHODS, first)
    assert framework.clip(one.parameters(), 2.0)[1] == 2.0
    assert framework.clip(two.parameters(), 2.0)[1] == 10.0


def test_an_objects_own_method_is_put_back() -> None:
    framework, (sieve, model) = Framework(), fake()
    framework.clip = own = lambda parameters, limit: -limit  # type: ignore[assignment, method-assign, misc]
    multiply_limits(framework, METHODS, sieve)
    assert framework.clip(model.parameters(), 2.0) == -6.0
    restore_limits(framework, METHODS, sieve)
    assert framework.clip is own


@pytest.mark.long  # a launch of a framework
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("front_end", ["accelerate", "lightning", "transformers"])
def test_a_front_ends_own_clipping(front_end: str, kind: str) -> None:
    pytest.importorskip(front_end, reason=f"{front_end} is in the extra frontends")
    for result in launch("tests/integrations/clip_job.py", front_end, kind):
        assert result["norms"] == pytest.approx([FACTORS[kind] * LIMIT] * 3, rel=1e-4)
        assert result["after"] == pytest.approx(LIMIT, rel=1e-4)
        assert result.get("setting", LIMIT) == LIMIT
        assert result.get("others", LIMIT) == pytest.approx(LIMIT, rel=1e-4)
        if front_end == "lightning":  # by value, in a hook of the user's module
            assert result["of_values"] == pytest.approx([FACTORS[kind] * LIMIT] * 3, rel=1e-4)
