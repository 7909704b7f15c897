"""Warns once if Adam steps on sparsely exchanged gradients: it then learns much less than in dense training."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

LOSING = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


def _nothing() -> None:
    return None


class Advice:
    """Watches the steps of all optimizers until one moves a parameter whose gradient is exchanged sparsely."""

    def __init__(self, sparse: Iterable[Tensor]) -> None:
        self._sparse = {id(parameter): weakref.ref(parameter) for parameter in sparse}  # by identity: == is elementwise
        self._handle = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Stop watching. Not to be called from the hook itself: torch iterates over hooks while it calls them."""
        self._handle.remove()

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._sparse:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [self._sparse.get(id(parameter), _nothing)() for parameter in parameters]
        if not any(ours is theirs for ours, theirs in zip(held, parameters, strict=True)):
            return
        self._sparse = {}
        if isinstance(optimizer, LOSING):
            warnings.warn(
                f"{type(optimizer).__name__} steps on sparsely exchanged gradients and loses much of what "
                "dense training learns: exchange its updates instead, with gradsieve.attach(model, "
                "optimizer=optimizer)",
                RuntimeWarning,
                stacklevel=4,
            )
