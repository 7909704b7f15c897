"""Models under an exchange of updates, measures and an optimizer that the library does not know."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.updates import UpdateSieve
from support.ddp_models import GROUP_MB, Net


def started(
    recipe: Any = "topkdsa", density: float = 0.05, net: nn.Module | None = None, make: Any = None, **settings: Any
) -> tuple[DistributedDataParallel, UpdateSieve, torch.optim.Optimizer]:
    model = DistributedDataParallel(net or Net(), **settings.pop("ddp", {}))
    optimizer = (make or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))(model.parameters())
    options = {"group_mb": GROUP_MB, "check_replicas_every": 1, **settings}
    sieve = gradsieve.attach(model, recipe, density=density, optimizer=optimizer, **options)
    assert isinstance(sieve, UpdateSieve)
    return model, sieve, optimizer


def sum_of_local_models(sieve: UpdateSieve) -> dict[str, Tensor]:
    """Shared model minus residual, over all ranks."""
    sums = {}
    for name, shared in sieve.shared_parameters().items():
        sums[name] = shared.double() - sieve.engine.residual(name).double()
        dist.all_reduce(sums[name])
    return sums


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, that no library knows."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.sub_((0.9 * moment + 0.1 * p.grad).sign(), alpha=group["lr"])
                moment.lerp_(p.grad, 0.01)
