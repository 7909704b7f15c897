"""Accelerate: `attach` after `prepare()`, then `save_with` for checkpoints and `clip_with` for clipping.

`accelerator.register_for_checkpointing(sieve)` is not enough: only the main process writes registered objects, and a
rank refuses the state of another rank.
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
    """Save and load each rank's state with the accelerator's checkpoints.

    Args:
        accelerator: The `Accelerator`.
        model: The prepared model, to which `sieve` is attached.
        sieve: The sieve that `attach` returned.

    Example::

        model, optimizer = accelerator.prepare(model, optimizer)
        sieve = gradsieve.attach(model, optimizer=optimizer)
        save_with(accelerator, model, sieve)
        accelerator.save_state("checkpoint")
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        resuming.save_in(folder, sieve)

    def load(models: list[Any], folder: str) -> None:
        resuming.load_from(folder, sieve, model.process_group)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def clip_with(accelerator: Any, sieve: Sieve) -> Callable[[], None]:
    """Multiply the limits of `accelerator.clip_grad_norm_` and `clip_grad_value_` by `sieve.clip_factor`.

    Only calls that clip parameters of this sieve are changed. Use the limits that dense training would use.

    Args:
        accelerator: The `Accelerator`.
        sieve: The sieve that `attach` returned.

    Returns:
        A function that undoes it.

    Example::

        clip_with(accelerator, sieve)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    """
    multiply_limits(accelerator, CLIPPING, sieve)
    return lambda: restore_limits(accelerator, CLIPPING, sieve)
