"""Optimizer settings: an optimizer without its parameters.

torch's optimizers are built with `fused=True`: they pass over memory once, and Adam's step takes a fifth of the time on
a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from gradsieve.errors import InputError
from gradsieve.optim import LazyAdam


class OptimizerSetting(Protocol):
    """Builds an optimizer. `rate` is the base learning rate, which a schedule multiplies."""

    @property
    def rate(self) -> float: ...

    def build(self, model: nn.Module) -> Optimizer:
        """An optimizer for all trained parameters of the model."""
        ...

    def at(self, rate: float) -> OptimizerSetting:
        """The same setting with another base learning rate."""
        ...

    def without_momentum(self) -> OptimizerSetting:
        """The same setting without momentum, at the learning rate that momentum amounts to."""
        ...

    def lazy(self) -> OptimizerSetting:
        """The `LazyAdam` that corresponds to this setting; an error if there is none."""
        ...


@dataclass(frozen=True)
class Sgd(OptimizerSetting):
    """Stochastic gradient descent with momentum."""

    rate: float = 0.1  # higher learns faster, and diverges earlier
    momentum: float = 0.9  # higher smooths over more steps
    weight_decay: float = 0.0  # higher keeps weights smaller
    nesterov: bool = False

    @override
    def build(self, model: nn.Module) -> Optimizer:
        """All parameters decay, as in the papers."""
        return torch.optim.SGD(
            model.parameters(),
            self.rate,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=True,
        )

    @override
    def at(self, rate: float) -> Sgd:
        return replace(self, rate=rate)

    @override
    def without_momentum(self) -> Sgd:
        """Momentum adds up steps: a gradient moves the weights by 1 / (1 - momentum) times as much in total."""
        return replace(self, rate=self.rate / (1 - self.momentum), momentum=0.0, nesterov=False)

    @override
    def lazy(self) -> Sgd:
        raise InputError("-lazy is a variant of Adam, but this workload is trained with SGD: use a name without -lazy")


@dataclass(frozen=True)
class Adam(OptimizerSetting):
    """Adam with decoupled weight decay (AdamW). Biases and norms do not decay."""

    rate: float = 1e-3  # higher learns faster, and diverges earlier
    weight_decay: float = 0.0  # higher keeps weights smaller
    betas: tuple[float, float] = (0.9, 0.999)  # higher smooths over more steps

    @override
    def build(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(_decaying(model, self.weight_decay), self.rate, self.betas, fused=True)

    @override
    def at(self, rate: float) -> Adam:
        return replace(self, rate=rate)

    @override
    def without_momentum(self) -> Adam:
        """Adam's momentum is a mean of gradients, so the learning rate stays."""
        return replace(self, betas=(0.0, self.betas[1]))

    @override
    def lazy(self) -> Lazy:
        return Lazy(self.rate, self.weight_decay, self.betas[1])


@dataclass(frozen=True)
class Lazy(OptimizerSetting):
    """`LazyAdam`: Adam without first moments, with per-entry step counts. Biases and norms do not decay."""

    rate: float = 1e-3  # higher learns faster, and diverges earlier
    weight_decay: float = 0.0  # higher keeps weights smaller
    beta: float = 0.999  # higher smooths over more deliveries

    @override
    def build(self, model: nn.Module) -> Optimizer:
        return LazyAdam(_decaying(model, self.weight_decay), self.rate, self.beta)

    @override
    def at(self, rate: float) -> Lazy:
        return replace(self, rate=rate)

    @override
    def without_momentum(self) -> Lazy:
        return self

    @override
    def lazy(self) -> Lazy:
        return self


def _decaying(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, biases and norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
