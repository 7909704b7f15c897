"""The one-call form, for users who write their own training loop."""

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
    """The result of `sparse_allreduce`."""

    mean: Tensor  # over all ranks, dense
    state: PipelineState  # for the next call


def sparse_allreduce(
    tensor: Tensor,
    recipe: str | Recipe = "oktopk",
    *,
    density: float,
    comm: Comm | dist.ProcessGroup | None = None,
    state: PipelineState | None = None,
    out: Tensor | None = None,
) -> Averaged:
    """Average a tensor over all ranks, sending only about `density` of its entries.

    Undelivered entries are kept in the returned state and added to the next tensor. All ranks call it together, with
    the same recipe and density.

    Args:
        tensor: This rank's gradient: 1-D, contiguous, floating point.
        recipe: What to send and how to sum it, by name or as a `Recipe`.
        density: Fraction of the entries to send, in (0, 1].
        comm: The ranks: a `Comm`, a process group, or None for the default process group.
        state: The state that the previous call returned for this tensor; None at the first call.
        out: Where the mean is written; a new tensor if None. It may be `tensor` itself, whose values are then lost
            even if the call fails.

    Returns:
        The dense mean, and the state for the next call.

    Raises:
        InputError: An argument is not allowed, or the state belongs to another tensor.
        MismatchError: The ranks gave tensors of different length or different densities.
        PeerLostError: A peer died or did not answer.

    Example:
        >>> import torch
        >>> from gradsieve import sparse_allreduce
        >>> from gradsieve.testing import run_ranks
        >>> def train_step(comm):
        ...     grad = torch.zeros(1000)
        ...     grad[comm.rank] = 3.0
        ...     mean, state = sparse_allreduce(grad, density=0.01, comm=comm)
        ...     return mean[:3].tolist()
        >>> run_ranks(2, train_step)
        [[1.5, 1.5, 0.0], [1.5, 1.5, 0.0]]
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
    """Return a `Comm` for a process group, or for the default group if None."""
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
