"""Hugging Face Trainer: `trainer.add_callback(SieveCallback(trainer))`, started by torchrun.

Callbacks are shown the bare model, never the wrapped one: so the trainer itself is handed over. Each rank's state
lies in the trainer's checkpoint folders, as its random states do, and goes when they are rotated away.
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
    """Attaches when training begins, saves and resumes with the trainer's checkpoints. Takes what `attach` takes.

    The updates of the trainer's optimizer are exchanged; with `exchange="gradients"`, its gradients. Where updates are,
    the trainer clips at `max_grad_norm` times `sieve.clip_factor` while it trains.

    `resume_from` is the folder given to `trainer.train(resume_from_checkpoint=...)`, needed only if it is not the
    `checkpoint-<step>` in the output folder: the trainer does not tell its callbacks.
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
        """The model has been wrapped by now, and a checkpoint's weights loaded."""
        model = self._trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise InputError(
                f"SieveCallback needs a model wrapped by DDP, got {type(model).__name__}: start the script with "
                "torchrun --nproc-per-node=N, N at least 2"
            )
        if self.sieve is None or model is not self._model:  # else train() was called once more
            restore_limits(self._trainer.accelerator, CLIPPING, self.sieve)
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            settings = self._choice.for_attach([self._trainer.optimizer], scaler)
            self.sieve, self._model = attach(model, **settings), model
        if state.global_step > 0:
            folder = self._resume_from or checkpoint_folder(args, state)
            resuming.load_from(folder, self.sieve, model.process_group)
        multiply_limits(self._trainer.accelerator, CLIPPING, self.sieve)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The trainer's clipping is its own again."""
        restore_limits(self._trainer.accelerator, CLIPPING, self.sieve)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """All ranks come here, after the trainer has written its own files."""
        if self.sieve is not None and not args.save_only_model:
            resuming.save_in(checkpoint_folder(args, state), self.sieve)


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Where the trainer saves at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
