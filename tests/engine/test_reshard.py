"""States of one world size loaded onto another: what is owed is neither lost nor made up. Ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import RECIPES, Constant, InputError, Rules, checkpoint
from gradsieve.checkpoint.reshard import resharded
from gradsieve.comm import Comm, CountingComm
from gradsieve.engine import Engine, Settings, Step
from gradsieve.engine.groups import cut_into_groups
from gradsieve.recipes import recipe as named_recipe
from gradsieve.testing import run_ranks

SHAPES = {"one": (50, 60), "bias": (30,), "two": (60, 70)}
WITH_FEEDBACK = [name for name in RECIPES if name != "dense"]


def engine(comm: Comm, recipe: str, dtype: torch.dtype) -> Engine:
    parameters = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
    settings = Settings(named_recipe(recipe), Constant(0.05))
    return Engine(cut_into_groups(parameters, Rules(), 0.001), settings, CountingComm(comm))


def run_step(made: Engine, number: int, dtype: torch.dtype, scale: float | None = None) -> dict[str, Tensor]:
    """Whole numbers: sums are exact in any order. What was delivered comes back, as a sum over ranks."""
    generator = torch.Generator().manual_seed(100 * number + made.comm.rank)
    grads = {
        name: torch.randint(-8, 9, (torch.Size(shape).numel(),), generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }
    step = Step(made, scale)
    for name, grad in grads.items():
        step.deliver(name, grad)
        for index in step.ready():
            step.exchange(index)
    assert step.finish()
    return grads


def saved_by(size: int, recipe: str, dtype: torch.dtype, scale: float | None = None) -> dict[str, Any]:
    def work(comm: Comm) -> dict[str, Any]:
        made = engine(comm, recipe, dtype)
        for number in range(3):
            run_step(made, number, dtype, scale)
        return checkpoint.packed(made)

    return {key: state for one in run_ranks(size, work) for key, state in one.items()}


def loaded_by(size: int, states: dict[str, Any], recipe: str, dtype: torch.dtype, **how: Any) -> dict[str, Any]:
    def work(comm: Comm) -> dict[str, Any]:
        made = engine(comm, recipe, dtype)
        run_step(made, 50, dtype)  # what was before must be gone
        checkpoint.unpack_into(made, states, **how)
        loaded = checkpoint.packed(made)
        run_step(made, 4, dtype)
        assert made.steps_done == 4
        return loaded

    return {key: state for one in run_ranks(size, work) for key, state in one.items()}


def total(states: dict[str, Any], kind: str) -> dict[str, Tensor]:
    vectors: dict[str, list[Tensor]] = {}
    for state in states.values():
        for name, kinds in state["parameters"].items():
            if kind in kinds:
                vectors.setdefault(name, []).append(kinds[kind].double())
    return {name: torch.stack(each).sum(0) for name, each in vectors.items()}


@pytest.mark.parametrize("recipe", WITH_FEEDBACK)
@pytest.mark.parametrize(("old", "new"), [(4, 3), (2, 5), (4, 1)])
def test_the_sum_over_ranks_of_what_is_owed_is_kept(recipe: str, old: int, new: int) -> None:
    states = saved_by(old, recipe, torch.float64)
    loaded = loaded_by(new, states, recipe, torch.float64)
    assert sorted(loaded) == [f"rank {rank} of {new}" for rank in range(new)]
    for kind in ("residual", "velocity") if recipe == "dgc" else ("residual",):
        before, after = total(states, kind), total(loaded, kind)
        assert set(before) == {"one", "two"}
        for name, vector in before.items():
            assert vector.any()
            if recipe == "dgc":  # its momentum makes fractions, which round
                assert torch.allclose(after[name], vector, rtol=1e-14, atol=1e-14), (kind, name)
            else:
                assert torch.equal(after[name], vector), (kind, name)


def test_in_single_precision_a_merged_residual_is_rounded_once() -> None:
    states = saved_by(4, "dgc", torch.float32)
    loaded = loaded_by(3, states, "dgc", torch.float32)
    for name in ("one", "two"):
        first, second = (states[f"rank {rank} of 4"]["parameters"][name]["residual"].double() for rank in (0, 3))
        assert torch.equal(loaded["rank 0 of 3"]["parameters"][name]["residual"], (first + second).float())
        for rank in (1, 2):
            old, new = states[f"rank {rank} of 4"], loaded[f"rank {rank} of 3"]
            assert torch.equal(new["parameters"][name]["residual"], old["parameters"][name]["residual"])


def test_more_ranks_than_before_take_everything_bit_for_bit() -> None:
    states = saved_by(2, "oktopk", torch.float32)
    loaded = loaded_by(5, states, "oktopk", torch.float32)
    for rank in range(5):
        for name in ("one", "two"):
            ours = loaded[f"rank {rank} of 5"]["parameters"][name]["residual"]
            if rank < 2:
                assert torch.equal(ours, states[f"rank {rank} of 2"]["parameters"][name]["residual"])
            else:
                assert not ours.any()


def test_keeping_the_mean_keeps_the_effect_on_parameters() -> None:
    states = saved_by(2, "topka", torch.float64)
    before = total(states, "residual")
    after = total(loaded_by(4, states, "topka", torch.float64, keep="mean"), "residual")
    for name in before:
        assert torch.equal(after[name] / 4, before[name] / 2)
    with pytest.raises(InputError, match="rank 1: keep must be 'sum' or 'mean', got 'median'"):
        resharded(states, 1, 4, "median")  # type: ignore[arg-type]


def test_what_is_owed_in_another_loss_scale_is_brought_to_one() -> None:
    states = saved_by(2, "topka", torch.float64, scale=4.0)
    other = states["rank 1 of 2"]
    states["rank 1 of 2"] = {
        **other,
        "loss_scale": 8.0,
        "parameters": {
            name: {kind: vector * 2 for kind, vector in kinds.items()} for name, kinds in other["parameters"].items()
        },
    }
    merged = resharded(states, 0, 1)
    assert merged["loss_scale"] == 4.0
    for name in ("one", "two"):
        first = states["rank 0 of 2"]["parameters"][name]["residual"]
        assert torch.equal(merged["parameters"][name]["residual"], first + other["parameters"][name]["residual"])


def test_states_of_different_parameters_are_refused() -> None:
    states = saved_by(2, "topka", torch.float64)
    states["rank 1 of 2"] = {**states["rank 1 of 2"], "parameters": {}}
    with pytest.raises(InputError, match="rank 2: old ranks 0 and 1 have residuals of different parameters"):
        resharded(states, 2, 3)
