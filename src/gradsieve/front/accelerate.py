"""Accelerate: `attach` after `prepare()`, then `save_with(accelerator, model, sieve)` for its own saving and loading.

`accelerator.register_for_checkpointing(sieve)` is not enough: only the main process writes what is registered there,
and a rank that is given another's state refuses it.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsieve.front import resuming
from gradsieve.sieve import Sieve


def save_with(accelerator: Any, model: DistributedDataParallel, sieve: Sieve) -> None:
    """Have every rank's state saved and loaded with the accelerator's. `model` is what `sieve` is attached to."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        resuming.save_in(folder, sieve)

    def load(models: list[Any], folder: str) -> None:
        resuming.load_from(folder, sieve, model.process_group)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
