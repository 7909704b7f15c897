"""A small model without a group, its gradients drawn from a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def give_grads(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        give_grads(net, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]
