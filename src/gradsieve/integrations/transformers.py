"""Hugging Face Trainer: `trainer.add_callback(SieveCallback(trainer))`, started by torchrun.

Callbacks get the bare model, never the wrapped one. So the callback needs the trainer itself. Each rank's state is
saved to the trainer's checkpoint folders, as its random states are, and is deleted with them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp import attach
from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.integrations import resuming
from gradsieve.integrations.accelerate import CLIPPING
from gradsieve.integrations.choosing import Choice, Exchanged
from gradsieve.integrations.clipping import multiply_limits, restore_limits
from gradsieve.recipes import Recipe
from gradsieve.sieve import Sieve

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "gradsieve.integrations.transformers needs transformers and accelerate, which are not installed: "
        "pip install transformers accelerate"
    ) from error


class SieveCallback(TrainerCallback):
    """Attaches a sieve when training begins, and saves and resumes with the trainer's checkpoints.

    If updates are exchanged, the trainer clips at `max_grad_norm` times `sieve.clip_factor` while it trains. The
    attribute `sieve` is the handle, once training has begun.

    Args:
        trainer: The trainer.
        recipe: As for `attach`.
        density: As for `attach`.
        exchange: "updates" of the trainer's optimizer, or "gradients".
        resume_from: The folder given to `trainer.train(resume_from_checkpoint=...)`, which the trainer does not pass to
            callbacks. Needed only if it is not `checkpoint-<step>` in the output folder.
        **settings: Further keyword arguments of `attach`.

    Raises:
        InputError: `exchange` is neither of the two.

    Example::

        trainer.add_callback(SieveCallback(trainer))
        trainer.train()
    """

    def __init__(
        self,
        trainer: Any,
        recipe: str | Recipe | None = None,
        *,
        density: float | Schedule | None = None,
        exchange: Exchanged = "updates",
        resume_from: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        self._trainer = trainer
        self._choice = Choice(recipe, density, exchange, settings)
        self._resume_from = resume_from
        self._model: DistributedDataParallel | None = None
        self.sieve: Sieve | None = None  # once training has begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Attach and resume: the model has been wrapped by now, and a checkpoint's weights have been loaded."""
        model = self._trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise InputError(
                f"SieveCallback needs a model wrapped by DDP, got {type(model).__name__}: start the script with "
                "torchrun --nproc-per-node=N, N at least 2"
            )
        if self.sieve is None or model is not self._model:  # otherwise train() was called again
            restore_limits(self._trainer.accelerator, CLIPPING, self.sieve)
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            settings = self._choice.for_attach([self._trainer.optimizer], scaler)
            self.sieve, self._model = attach(model, **settings), model
        if state.global_step > 0:
            folder = self._resume_from or checkpoint_folder(args, state)
            resuming.load_from(folder, self.sieve, model.process_group)
        multiply_limits(self._trainer.accelerator, CLIPPING, self.sieve)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Restore the trainer's clipping."""
        restore_limits(self._trainer.accelerator, CLIPPING, self.sieve)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write this rank's state, after the trainer has written its own files. All ranks call it."""
        if self.sieve is not None and not args.save_only_model:
            resuming.save_in(checkpoint_folder(args, state), self.sieve)


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Return the folder of the trainer's checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
