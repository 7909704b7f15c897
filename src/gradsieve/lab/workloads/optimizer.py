"""Optimizers as settings: what to build, apart from the parameters it will move.

Torch's are the fused ones, which go over memory once: Adam's step takes a fifth of the time on a processor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradsieve.errors import InputError
from gradsieve.optim import LazyAdam


class OptimizerSetting(Protocol):
    """Knows the base rate, which a schedule multiplies."""

    @property
    def rate(self) -> float:
        """The base rate."""

    def build(self, model: nn.Module) -> Optimizer:
        """For all that is trained in this model."""

    def at(self, rate: float) -> OptimizerSetting:
        """With another base rate."""

    def without_momentum(self) -> OptimizerSetting:
        """At the rate that momentum comes to."""

    def lazy(self) -> OptimizerSetting:
        """With moments that count deliveries."""


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum."""

    rate: float = 0.1  # more moves faster, and breaks sooner
    momentum: float = 0.9  # more smooths over more steps
    weight_decay: float = 0.0  # more keeps weights smaller
    nesterov: bool = False

    def build(self, model: nn.Module) -> Optimizer:
        """Everything decays alike, as in the papers."""
        return torch.optim.SGD(
            model.parameters(),
            self.rate,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=True,
        )

    def at(self, rate: float) -> Sgd:
        """With another base rate."""
        return replace(self, rate=rate)

    def without_momentum(self) -> Sgd:
        """Momentum adds up steps: what is moved in the end is 1 / (1 - momentum) as much."""
        return replace(self, rate=self.rate / (1 - self.momentum), momentum=0.0, nesterov=False)

    def lazy(self) -> Sgd:
        """SGD has no second moments."""
        raise InputError("lazy is a kind of Adam, and this workload is trained by SGD: take the ending -lazy off")


@dataclass(frozen=True)
class Adam:
    """Adam with decay apart from the gradient (AdamW)."""

    rate: float = 1e-3  # more moves faster, and breaks sooner
    weight_decay: float = 0.0  # more keeps weights smaller
    betas: tuple[float, float] = (0.9, 0.999)  # more smooths over more steps

    def build(self, model: nn.Module) -> Optimizer:
        """Biases and norms do not decay."""
        return torch.optim.AdamW(_decaying(model, self.weight_decay), self.rate, self.betas, fused=True)

    def at(self, rate: float) -> Adam:
        """With another base rate."""
        return replace(self, rate=rate)

    def without_momentum(self) -> Adam:
        """Its momentum is a mean: the rate stays."""
        return replace(self, betas=(0.0, self.betas[1]))

    def lazy(self) -> Lazy:
        """Without first moments; the rate stays."""
        return Lazy(self.rate, self.weight_decay, self.betas[1])


@dataclass(frozen=True)
class Lazy:
    """Adam whose moments count deliveries, see `LazyAdam`."""

    rate: float = 1e-3  # more moves faster, and breaks sooner
    weight_decay: float = 0.0  # more keeps weights smaller
    beta: float = 0.999  # more smooths over more deliveries

    def build(self, model: nn.Module) -> Optimizer:
        """Biases and norms do not decay."""
        return LazyAdam(_decaying(model, self.weight_decay), self.rate, self.beta)

    def at(self, rate: float) -> Lazy:
        """With another base rate."""
        return replace(self, rate=rate)

    def without_momentum(self) -> Lazy:
        """It has none."""
        return self

    def lazy(self) -> Lazy:
        """It is."""
        return self


def _decaying(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters: matrices decay, biases and norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
