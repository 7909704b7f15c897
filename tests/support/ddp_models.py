"""Models and measures for the DDP checks: small, but with several groups of each kind."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import Sieve

GROUP_MB = 0.016  # every matrix below is a group of its own


class Net(nn.Module):
    """Three matrices that go sparse, three biases and a small head that go dense."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(64, 64, dtype=dtypes[0])
        self.second = nn.Linear(64, 64, dtype=dtypes[1])
        self.third = nn.Linear(64, 48, dtype=dtypes[2])
        self.head = nn.Linear(48, 4, dtype=dtypes[2])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.head(x)


class Whole(nn.Module):
    """Its gradients are its inputs, so whole numbers stay whole: sums are exact in any order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(60, 50, dtype=dtype))
        self.two = nn.Parameter(torch.zeros(50, 70, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(40, dtype=dtype))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * grad).sum() for name, grad in inputs.items()]).sum()


def whole_grads(model: Whole, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-8, 9, tuple(p.shape), generator=generator).to(p.dtype)
        for name, p in model.named_parameters()
    }


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(batch(rank, step)).float() - 0.5).square().mean()


def train(model: DistributedDataParallel, steps: range, rank: int, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def attached(recipe: Any = "oktopk", density: Any = 0.05, *, ddp: dict[str, Any] | None = None, **settings: Any) -> Any:
    model = DistributedDataParallel(settings.pop("model", None) or Net(), **(ddp or {}))
    sieve = gradsieve.attach(
        model, recipe, density=density, **{"group_mb": GROUP_MB, "check_replicas_every": 0, **settings}
    )
    return model, sieve, torch.optim.SGD(model.parameters(), lr=0.1)


def digest(tensors: Any) -> str:
    """Of all bits."""
    sums = hashlib.sha256()
    for tensor in tensors:
        sums.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def parameters_digest(model: nn.Module) -> str:
    return digest(model.parameters())


def own_state(sieve: Sieve) -> dict[str, Any]:
    (state,) = sieve.state_dict().values()
    return state


def state_tensors(sieve: Sieve) -> list[Tensor]:
    saved = own_state(sieve)["parameters"]
    return [tensor for name in sorted(saved) for _, tensor in sorted(saved[name].items())]


def pending(sieve: Sieve) -> dict[str, Tensor]:
    """What all ranks together still owe."""
    saved = own_state(sieve)["parameters"]
    owed = {name: vectors["residual"].double() for name, vectors in saved.items() if vectors}
    for vector in owed.values():
        dist.all_reduce(vector)
    return owed


def same_everywhere(text: str) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, text)
    return len(set(gathered)) == 1
