"""Theory that software can check: how much of a vector top-k leaves behind, and how picks fill up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import REDUCERS, SELECTORS
from gradsieve.reducers.cost import lower_bound_words

NUMEL = 100_000


def left_behind(x: Tensor, k: int) -> float:
    """|u - Top_k(u)|^2 / |u|^2."""
    selector = SELECTORS["exact"]()
    local, _ = selector(x, k, selector.init(x.numel()))
    rest = x.clone()
    rest[local.indices] = 0
    return float(rest.double().square().sum() / x.double().square().sum())


def drawn(name: str) -> Tensor:
    torch.manual_seed(0)
    uniform = torch.rand(NUMEL, dtype=torch.float64) * 2 - 1
    return {
        "normal": lambda: torch.randn(NUMEL, dtype=torch.float64),
        "laplace": lambda: -uniform.sign() * torch.log1p(-uniform.abs()),
        "student": lambda: torch.distributions.StudentT(torch.tensor(4.0, dtype=torch.float64)).sample((NUMEL,)),
        "uniform": lambda: uniform,
        "signs": lambda: uniform.sign(),
        "bimodal": lambda: uniform.sign() + 1e-3 * torch.randn(NUMEL, dtype=torch.float64),
    }[name]()


BELLS = ["normal", "laplace", "student"]
ALL = [*BELLS, "uniform", "signs", "bimodal"]
DENSITIES = [0.001, 0.01, 0.1, 0.5]


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", ALL)
def test_top_k_always_contracts(name: str, density: float) -> None:
    k = int(NUMEL * density)
    assert left_behind(drawn(name), k) <= 1 - k / NUMEL + 1e-12


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", BELLS)
def test_bell_shaped_vectors_contract_squared(name: str, density: float) -> None:
    k = int(NUMEL * density)
    assert left_behind(drawn(name), k) <= (1 - k / NUMEL) ** 2


@pytest.mark.parametrize("density", DENSITIES)
def test_uniform_vectors_contract_cubed(density: float) -> None:
    # The sample's own spread: the second moment of 100,000 uniform values varies by 0.3 %.
    assert left_behind(drawn("uniform"), int(NUMEL * density)) == pytest.approx((1 - density) ** 3, rel=0.01)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", ["signs", "bimodal"])
def test_two_humps_are_the_counter_example(name: str, density: float) -> None:
    """There the squared bound fails and the general one is met."""
    left = left_behind(drawn(name), int(NUMEL * density))
    assert left == pytest.approx(1 - density, rel=0.005)
    assert left > (1 - density) ** 2


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_random_picks_fill_up_as_expected(size: int) -> None:
    density = 0.02
    union = torch.zeros(NUMEL, dtype=torch.bool)
    for seed in range(size):
        selector = SELECTORS["random"](seed=seed)
        local, _ = selector(torch.ones(NUMEL), int(NUMEL * density), selector.init(NUMEL))
        union[local.indices.long()] = True
    assert int(union.sum()) == pytest.approx(NUMEL * (1 - (1 - density) ** size), rel=0.03)


def test_costs_are_ordered_as_the_paper_says() -> None:
    size, k, numel = 32, 147_000, 14_700_000
    words = {name: reducer().cost(size, k, numel).words for name, reducer in REDUCERS.items()}
    assert lower_bound_words(size, k) < words["oktopk"] < words["gtopk"] < words["topka"]
    assert words["oktopk"] == pytest.approx(2 * lower_bound_words(size, k))
    assert words["oktopk"] < words["dense"] / 40
    # It does not grow with the number of ranks.
    assert REDUCERS["oktopk"]().cost(64, k, numel).words < 1.02 * words["oktopk"]
    assert REDUCERS["topka"]().cost(64, k, numel).words > 1.9 * words["topka"]
