"""What all models of the laboratory share: shapes in several sizes, and an initialization decided by a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from gradsieve.errors import InputError

S = TypeVar("S")


@dataclass(frozen=True)
class Architecture(Generic[S]):
    """A model in several sizes: the papers', a small one that trains within minutes on two cores, others in between."""

    make: Callable[[S], nn.Module]  # builds a model from a shape
    paper: S
    small: S
    num_parameters: int  # of the paper's size; checked by the tests
    description: str
    between: Mapping[str, S] = field(default_factory=dict)  # sizes between small and paper, by name

    @property
    def sizes(self) -> Mapping[str, S]:
        """All shapes by name, from small to large."""
        return {"small": self.small, **self.between, "paper": self.paper}

    def shape(self, size: str, **fields: Any) -> S:
        """The shape of this size, with fields that depend on the data: classes, vocabulary, features."""
        if size not in self.sizes:
            raise InputError(f"size of {self.description} must be one of {', '.join(self.sizes)}, got {size!r}")
        chosen: Any = self.sizes[size]
        changed: S = replace(chosen, **fields)
        return changed

    def build(self, shape: S, seed: int) -> nn.Module:
        """A model that is equal on every rank. The global random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(shape)


def count_parameters(model: nn.Module) -> int:
    """The number of trained parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def init_convolutions(model: nn.Module) -> None:
    """Normal weights that keep the variance through ReLUs (He et al., 2015). Norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
