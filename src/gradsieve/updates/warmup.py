"""What `engine.warmup` calls to compile the kernels for an exchange of updates."""

from __future__ import annotations

import torch

from gradsieve.comm import Comm, CountingComm
from gradsieve.engine import Settings
from gradsieve.engine.groups import Group
from gradsieve.engine.warmup import NAME, STEPS, noise
from gradsieve.updates.engine import UpdateEngine
from gradsieve.updates.model import LocalModel


@torch.no_grad()
def rehearse_updates(comm: Comm, groups: tuple[Group, ...], settings: Settings) -> None:
    """Exchange some random updates of a tiny model."""
    parameter = torch.zeros(groups[0].numel, dtype=groups[0].dtype, device="cpu")
    engine = UpdateEngine(groups, settings, CountingComm(comm), {NAME: parameter})
    local = LocalModel({NAME: parameter}, engine)
    for number in range(STEPS):
        local.ahead()
        parameter.add_(noise(number, comm.rank, parameter.dtype))
        local.rest()
        engine.exchange_all()
        local.exchanged()
