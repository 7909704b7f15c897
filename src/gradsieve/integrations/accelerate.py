"""Accelerate: `attach` after `prepare()`, then `save_with` for saving and loading, and `clip_with` for clipping.

`accelerator.register_for_checkpointing(sieve)` is not enough: only the main process writes what is registered there,
and a rank that is given another's state refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsieve.integrations import resuming
from gradsieve.integrations.clipping import multiply_limits, restore_limits
from gradsieve.sieve import Sieve

CLIPPING = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "clip_value"}


def save_with(accelerator: Any, model: DistributedDataParallel, sieve: Sieve) -> None:
    """Have every rank's state saved and loaded with the accelerator's. `model` is what `sieve` is attached to."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        resuming.save_in(folder, sieve)

    def load(models: list[Any], folder: str) -> None:
        resuming.load_from(folder, sieve, model.process_group)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def clip_with(accelerator: Any, sieve: Sieve) -> Callable[[], None]:
    """Have `accelerator.clip_grad_norm_` and `clip_grad_value_` multiply their limits by `sieve.clip_factor`.

    Only where they clip parameters of this sieve. Give the limits that dense training would use.

    Returns:
        A function that takes it back.

    Example:
        >>> clip_with(accelerator, sieve)
        >>> accelerator.backward(loss)
        >>> accelerator.clip_grad_norm_(model.parameters(), 1.0)
    """
    multiply_limits(accelerator, CLIPPING, sieve)
    return lambda: restore_limits(accelerator, CLIPPING, sieve)
