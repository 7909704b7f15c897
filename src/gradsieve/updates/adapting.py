"""Checks the optimizer whose updates are exchanged, and turns it into its sieve-aware form in place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve.errors import InputError
from gradsieve.updates.adam import Adam, AdamW
from gradsieve.updates.own import OwnGradients
from gradsieve.updates.sgd import SGD

AWARE: dict[type[Optimizer], type[OwnGradients]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
"""The sieve-aware form of each torch optimizer that has one. Subclasses have none, since their changes are unknown."""


def adapt(optimizer: Optimizer) -> OwnGradients:
    """Turn a live `torch.optim.AdamW`, `Adam` or `SGD` into its sieve-aware form, in place.

    State, parameter groups, hooks and schedulers that hold the optimizer are kept.
    """
    followed = getattr(optimizer.__dict__.pop("step", None), "_wrapped_by_lr_sched", False)
    optimizer.__class__ = AWARE[type(optimizer)]
    assert isinstance(optimizer, OwnGradients)
    optimizer._patch_step_function()
    if followed:
        _let_scheduler_follow(optimizer)
    return optimizer


def _let_scheduler_follow(optimizer: OwnGradients) -> None:
    """Wrap `step` of the new class as a scheduler did with that of the old class, to notice calls."""
    step = optimizer.step

    def seen(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    seen._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = seen  # type: ignore[method-assign]


def aware(optimizer: object, num_ranks: int) -> bool:
    """Adapt the innermost optimizer in place, and set the number of ranks that step on their own gradients.

    Returns False, and changes nothing, if it has no sieve-aware form.
    """
    *wrappers, inner = layers(optimizer)
    if isinstance(inner, Optimizer) and type(inner) in AWARE:
        adapt(inner)
        for wrapper in reversed(wrappers):
            _renew_step(wrapper)
    if isinstance(inner, OwnGradients):
        inner.for_ranks(num_ranks)
        return True
    return False


def _renew_step(wrapper: Any) -> None:
    """Let Accelerate's wrapper look up `step` again, as after unpickling: with a scaler it keeps the old class's."""
    if hasattr(wrapper, "_optimizer_patched_step_method"):
        wrapper.__setstate__(wrapper.__getstate__())


def layers(optimizer: object) -> list[object]:
    """Return an optimizer and those it wraps, down to the innermost: frameworks wrap the torch optimizer."""
    found = [optimizer]
    while isinstance(inner := getattr(found[-1], "optimizer", None), Optimizer):
        found.append(inner)
    return found


def checked_optimizer(optimizer: object, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Return the torch optimizer inside a framework's wrapper; raise if it cannot train this model."""
    *wrappers, inner = layers(optimizer)
    if any(hasattr(wrapper, "sieve") for wrapper in wrappers):
        raise InputError("this optimizer exchanges by itself: give attach the optimizer inside it, and step that one")
    if not isinstance(inner, Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
    owned = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
    if not any(id(tensor) in owned for tensor in parameters.values()):
        raise InputError("the optimizer has none of the model's parameters: give the one that trains this model")
    check_one_gradient(inner)
    return inner


def check_one_gradient(optimizer: Optimizer) -> None:
    """Refuse optimizers that must have a closure, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} evaluates the model several times per step and compares losses, which differ "
            "from rank to rank: use an optimizer that takes one gradient per step"
        )


def owned_by(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that the optimizer moves. Others have no updates."""
    owned = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: tensor for name, tensor in parameters.items() if id(tensor) in owned}


def rates(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter. Updates of different size must not share one step size."""
    by_identity = {id(tensor): group.get("lr", 0.0) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: float(by_identity[id(tensor)]) for name, tensor in parameters.items()}
