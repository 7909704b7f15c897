"""Makes the optimizer states of all ranks the same, before all of them step on the mean gradient.

First moments are linear in the gradients. The mean of the ranks' first moments is that of their mean gradient, exactly.
Second moments are not: E[mean gradient²] = (q + (1 - q) / P) E[own gradient²], with q as in `adam.py`. So the mean of
the second moments is multiplied by this share, and divided by it when ranks step on their own gradients again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve.comm import Comm
from gradsieve.updates.own import OwnGradients

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
CHUNK_ENTRIES = 1 << 22  # in one all_reduce; more needs more memory


class Entry(NamedTuple):
    """One value of the optimizer's state."""

    name: str  # of the parameter
    parameter: Tensor
    key: str
    value: Any

    def __str__(self) -> str:
        kind = tuple(self.value.shape) if isinstance(self.value, Tensor) else type(self.value).__name__
        return f"{self.name} {self.key} {kind}"


def can_average(optimizer: Optimizer, parameters: Mapping[str, Tensor], comm: Comm) -> bool:
    """Whether all ranks have the same kinds of state, and all can be averaged: no integers as in quantized states.

    The answer is the same on all ranks, which call this together.
    """
    entries = list(_entries(optimizer, parameters))
    possible = all(_is_vector(entry.value) or _is_number(entry.value) for entry in entries)
    text = "\n".join([str(possible), *map(str, entries)])
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    first, *others = comm.all_gather_v(digest)
    return possible and all(torch.equal(first, other) for other in others)


@torch.no_grad()
def average_(optimizer: Optimizer, parameters: Mapping[str, Tensor], comm: Comm) -> None:
    """Give all ranks the mean of their tensors and the largest of their numbers, such as counts of steps.

    All ranks call it together, with states of the same layout.
    """
    entries = list(_entries(optimizer, parameters))
    tensors = [entry.value for entry in entries if _is_vector(entry.value)]
    numbers = [entry for entry in entries if not _is_vector(entry.value)]
    _average(tensors, comm)
    if numbers:
        own = torch.tensor([float(entry.value) for entry in numbers], dtype=torch.float64)
        largest = torch.stack(comm.all_gather_v(own)).amax(dim=0).tolist()
        for entry, number in zip(numbers, largest, strict=True):
            _put(optimizer.state[entry.parameter], entry, number)
    scale_second_moments_(optimizer, parameters, comm.size)


@torch.no_grad()
def mean_gradients_(parameters: Mapping[str, Tensor], comm: Comm) -> None:
    """Overwrite the gradients with their means over all ranks, which call this together.

    A gradient that this rank does not have counts as zero. One that no rank has stays away.
    """
    tensors = list(parameters.values())
    held = comm.all_reduce(torch.tensor([float(tensor.grad is not None) for tensor in tensors])).tolist()
    for tensor in (tensor for tensor, count in zip(tensors, held, strict=True) if count and tensor.grad is None):
        tensor.grad = torch.zeros_like(tensor)
    _average([tensor.grad for tensor in tensors if tensor.grad is not None], comm)


def _average(tensors: list[Tensor], comm: Comm) -> None:
    for chunk in _chunks(tensors):
        summed = comm.all_reduce(torch.cat([part.detach().reshape(-1).float() for part in chunk]).contiguous())
        for tensor, mean in zip(chunk, torch.split(summed / comm.size, [part.numel() for part in chunk]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


@torch.no_grad()
def scale_second_moments_(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], num_ranks: int, *, back: bool = False
) -> None:
    """Turn second moments of own gradients into those of the mean gradient, or back."""
    if isinstance(optimizer, OwnGradients):
        for entry in _entries(optimizer, parameters):
            if entry.key in SECOND_MOMENTS:
                share = optimizer.share_of_mean(entry.parameter, num_ranks)
                entry.value.mul_(1 / share if back else share)


def _entries(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Iterator[Entry]:
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value = state[key]
            if isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield Entry(name, parameter, str(key), value)


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _is_number(value: object) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and not value.is_complex())


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + tensor.numel() > CHUNK_ENTRIES or tensor.device != chunk[0].device):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.numel()
    if chunk:
        yield chunk


def _put(state: dict[str, Any], entry: Entry, number: float) -> None:
    if isinstance(entry.value, Tensor):
        entry.value.fill_(number)
    else:
        state[entry.key] = type(entry.value)(number)
