"""The optimizer whose updates are exchanged: checked, and turned into its sieve-aware form in place."""

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
"""The sieve-aware form of each torch optimizer that has one. Subclasses have none: what they change is not known."""


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
    """A scheduler watches `step` through a function of the old class: give it one of the new class."""
    step = optimizer.step

    def seen(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    seen._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = seen  # type: ignore[method-assign]


def aware(optimizer: object, num_ranks: int) -> bool:
    """Tell the innermost optimizer how many ranks step on own gradients, adapting torch's own in place.

    Returns False, and leaves the optimizer as it is, if it has no sieve-aware form.
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
    """Accelerate's wrapper remembers the old class's `step` if it has a scaler: let it look again, as if unpickled."""
    if hasattr(wrapper, "_optimizer_patched_step_method"):
        wrapper.__setstate__(wrapper.__getstate__())


def layers(optimizer: object) -> list[object]:
    """The optimizer and what it wraps, to the innermost: frameworks wrap the torch optimizer in their own."""
    found = [optimizer]
    while isinstance(inner := getattr(found[-1], "optimizer", None), Optimizer):
        found.append(inner)
    return found


def checked_optimizer(optimizer: object, parameters: Mapping[str, Tensor]) -> Optimizer:
    """The torch optimizer inside a framework's wrapper; or one sentence why it cannot train this model."""
    *wrappers, inner = layers(optimizer)
    if any(hasattr(wrapper, "sieve") for wrapper in wrappers):
        raise InputError("this optimizer exchanges by itself: give attach the one that it wraps, and step that one")
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
            f"{type(optimizer).__name__} evaluates the model several times a step and compares losses, which differ "
            "from rank to rank: use an optimizer that takes one gradient a step"
        )


def owned_by(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that the optimizer moves: no others have updates."""
    owned = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: tensor for name, tensor in parameters.items() if id(tensor) in owned}


def rates(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Each parameter's learning rate. Updates of different size must not share the step size of one message."""
    by_identity = {id(tensor): group.get("lr", 0.0) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: float(by_identity[id(tensor)]) for name, tensor in parameters.items()}
