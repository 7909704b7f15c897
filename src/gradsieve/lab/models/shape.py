"""What every model of the laboratory has in common: a shape in some sizes, and a start that a seed decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import nn

from gradsieve.errors import InputError

Size = Literal["paper", "medium", "small"]
SIZES: tuple[Size, ...] = get_args(Size)

S = TypeVar("S")


@dataclass(frozen=True)
class Architecture(Generic[S]):
    """A model in the size of the papers, in one that trains in minutes on two cores, and some in between."""

    make: Callable[[S], nn.Module]  # a shape in, a model out
    paper: S
    small: S
    num_parameters: int  # of the paper's size; tests hold the model to it
    description: str
    medium: S | None = None  # a size that others have published, where exchanging outweighs computing on two cores

    def shape(self, size: Size, **fields: Any) -> S:
        """The shape of this size, with what the data decides (classes, vocabulary, features) put in."""
        if size not in SIZES:
            raise InputError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
        chosen: Any = {"paper": self.paper, "medium": self.medium, "small": self.small}[size]
        if chosen is None:
            raise InputError(f"there is no {size} size of {self.description}")
        changed: S = replace(chosen, **fields)
        return changed

    def build(self, shape: S, seed: int) -> nn.Module:
        """The same on every rank, without touching the global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(shape)


def count_parameters(model: nn.Module) -> int:
    """What is trained, each once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def init_convolutions(model: nn.Module) -> None:
    """Normal weights that keep the variance through rectifiers (He et al., 2015); norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
