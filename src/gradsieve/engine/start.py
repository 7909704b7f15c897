"""All ranks must start with the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.comm.tree import node
from gradsieve.engine import handshake

START = ("broadcast", "check", "trust")


def begin_alike(parameters: Mapping[str, Tensor], start: str, comm: Comm) -> None:
    """Copy rank 0's parameters to all ranks, or compare them, or do neither. All ranks call it together."""
    if start == "broadcast":
        for parameter in parameters.values():
            _broadcast_(parameter, comm)
    elif start == "check":
        handshake.compare({"parameters (digest)": _digest(parameters)}, comm)


def _broadcast_(parameter: Tensor, comm: Comm) -> None:
    """Send along a tree from rank 0: no rank sends more than log P times."""
    parent, children = node(comm.rank, comm.size)
    # In the order of the shape: the order in memory may differ from rank to rank.
    values = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
    if parent is not None:
        received = comm.send_recv(torch.empty(0, dtype=torch.uint8, device=values.device), None, parent)
        assert received is not None, "a comm returns what was received"
        values = received
        parameter.copy_(values.view(parameter.dtype).view(parameter.shape))
    for child in reversed(children):
        comm.send_recv(values, child, None)


def _digest(parameters: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters.values():
        digest.update(parameter.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
