"""DDP in two lines, on real processes: states that are saved, loaded, spread to other sizes, refused."""

from __future__ import annotations

import io
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import gradsieve
from gradsieve import RECIPES
from gradsieve.checkpoint.dcp import read_states
from gradsieve.recipes import recipe as named_recipe
from support.ddp_models import (
    Net,
    attached,
    digest,
    own_state,
    parameters_digest,
    state_tensors,
    train,
)
from support.rank_pool import on_ranks


def copied(state: Any) -> Any:
    """By way of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_ranks(4)
def test_resumed_equals_uninterrupted(rank: int) -> None:
    for recipe in [*RECIPES, *(named_recipe(name, values="int8") for name in ("oktopk", "gtopk", "spardl"))]:
        schedule = gradsieve.Exponential(0.2, 0.02, 4)
        straight, sieve, optimizer = attached(recipe, schedule)
        train(straight, range(6), rank, optimizer)
        half, saved_sieve, optimizer = attached(recipe, schedule, ddp={"bucket_cap_mb": 0.02})
        train(half, range(3), rank, optimizer)
        model, kept = copied(half.module.state_dict()), saved_sieve.state_dict()
        train(half, range(3, 5), rank, optimizer)  # what was kept must not follow
        saved_sieve.close()
        restored = Net()
        restored.load_state_dict(model)
        resumed, resumed_sieve, optimizer = attached(recipe, schedule, model=restored)
        resumed_sieve.load_state_dict(copied(kept))
        train(resumed, range(3, 6), rank, optimizer)
        assert parameters_digest(resumed) == parameters_digest(straight), recipe
        assert digest(state_tensors(resumed_sieve)) == digest(state_tensors(sieve)), recipe
        sieve.close()
        resumed_sieve.close()


@on_ranks(4)
def test_states_that_do_not_fit_are_refused(rank: int) -> None:
    _, sieve, _ = attached("oktopk")
    good = own_state(sieve)

    def refused(pattern: str, key: str = f"rank {rank} of 4", **changes: Any) -> None:
        with pytest.raises(gradsieve.InputError, match=pattern):
            sieve.load_state_dict({key: {**good, **changes}})

    other = (rank + 1) % 4
    refused(f"must be this rank's own .* holds 'rank {other} of 4'", key=f"rank {other} of 4")
    refused("those of all 3 ranks.*holds 'rank 0 of 3', and 'rank 1 of 3', 'rank 2 of 3' are", key="rank 0 of 3")
    refused("or those of all ranks of one run; it holds 'model'", key="model")
    with pytest.raises(gradsieve.InputError, match=r"steps_done is 7 on old rank 1, 0 on old rank 0"):
        sieve.load_state_dict({"rank 0 of 2": good, "rank 1 of 2": {**good, "steps_done": 7}})
    refused("saved with recipe Other", recipe="Other")
    refused("belongs to another model", names=("other",))
    short = {**good["parameters"], "first.weight": {"residual": torch.zeros(3)}}
    refused("residual of parameter first.weight must have 4096 entries, the state has 3", parameters=short)
    refused("kept dense in this run", parameters={**good["parameters"], "first.bias": {"residual": torch.ones(64)}})
    sieve.close()


@on_ranks(4)
def test_distributed_checkpoint_keeps_every_rank(rank: int) -> None:
    """By way of `torch.distributed.checkpoint`, which keeps one copy of what has the same name."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    for recipe in ("oktopk", "dgc"):
        path = f"{folder[0]}/{recipe}"
        straight, sieve, optimizer = attached(recipe)
        train(straight, range(3), rank, optimizer)
        dcp.save({"model": straight.module.state_dict(), "sieve": sieve}, checkpoint_id=path)
        kept = own_state(sieve)
        train(straight, range(3, 6), rank, optimizer)
        resumed, other, optimizer = attached(recipe)
        weights = resumed.module.state_dict()
        dcp.load({"model": weights, "sieve": other}, checkpoint_id=path)
        assert digest(state_tensors(other)) == digest(
            t for _, v in sorted(kept["parameters"].items()) for t in _sorted(v)
        )
        train(resumed, range(3, 6), rank, optimizer)
        assert parameters_digest(resumed) == parameters_digest(straight), recipe
        assert digest(state_tensors(other)) == digest(state_tensors(sieve)), recipe
        _loads_onto_a_smaller_group(rank, recipe, path, kept)
        sieve.close()
        other.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def _sorted(vectors: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(vectors.items())]


def _loads_onto_a_smaller_group(rank: int, recipe: str, path: str, kept: dict[str, Any]) -> None:
    """Ranks 0 to 2 go on with what four had saved."""
    sums = {name: vectors["residual"].double() for name, vectors in sorted(kept["parameters"].items())}
    for vector in sums.values():
        dist.all_reduce(vector)
    fewer = dist.new_group([0, 1, 2])
    if rank < 3:
        _, sieve, _ = attached(recipe, ddp={"process_group": fewer})
        sieve.load_state_dict(read_states(path))
        for name, vectors in sorted(own_state(sieve)["parameters"].items()):
            total = vectors["residual"].double()
            dist.all_reduce(total, group=fewer)
            assert torch.allclose(total, sums[name], rtol=1e-6, atol=1e-8), name
        sieve.close()
