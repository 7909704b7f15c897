"""The one-call form, for people who write their own training loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm import Comm, TorchComm
from gradsieve.errors import InputError
from gradsieve.pipeline import Pipeline, PipelineState, entries_to_keep
from gradsieve.recipes import Recipe
from gradsieve.recipes import recipe as named_recipe
from gradsieve.vector.pieces import Pieces


class Averaged(NamedTuple):
    """What `sparse_allreduce` gives back."""

    mean: Tensor
    state: PipelineState


def sparse_allreduce(
    tensor: Tensor,
    recipe: str | Recipe = "oktopk",
    *,
    density: float,
    comm: Comm | dist.ProcessGroup | None = None,
    state: PipelineState | None = None,
    out: Tensor | None = None,
) -> Averaged:
    """Average a gradient over all ranks, sending only about `density` of its entries.

    What is not sent now is kept in the state and sent later: pass the state that comes back to the next call, one for
    each tensor. All ranks call it together, with the same recipe and density.

    The mean is a new dense tensor, or `out`, which may be `tensor` itself: then its values are gone also if this fails.
    `comm` is a `Comm`, a process group, or None for the default group.
    """
    network = as_comm(comm)
    chosen = recipe if isinstance(recipe, Recipe) else named_recipe(recipe)
    _check_tensor("tensor", tensor, network)
    k = entries_to_keep(tensor.numel(), density, network)
    mean = torch.empty_like(tensor) if out is None else out
    _check_tensor("out", mean, network)
    if mean.shape != tensor.shape or mean.dtype != tensor.dtype:
        raise InputError(f"rank {network.rank}: out must be like tensor, got {_described(mean)}")
    pipeline = Pipeline(chosen, network)
    if state is None:
        state = pipeline.init(Pieces([tensor]))
    return Averaged(mean, pipeline.step(tensor, k, state, mean))


def as_comm(comm: Comm | dist.ProcessGroup | None) -> Comm:
    """Whatever names a group of ranks, as a comm."""
    return comm if isinstance(comm, Comm) else TorchComm(comm)


def _check_tensor(name: str, tensor: Tensor, comm: Comm) -> None:
    if tensor.dim() != 1:
        problem = "must be 1-D (flatten it first)"
    elif not tensor.dtype.is_floating_point:
        problem = "must be floating point"
    elif not tensor.is_contiguous():
        problem = "must be contiguous (call .contiguous() first)"
    elif tensor.numel() == 0:
        problem = "must have at least one entry"
    else:
        return
    raise InputError(f"rank {comm.rank}: {name} {problem}, got {_described(tensor)}")


def _described(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype}"
