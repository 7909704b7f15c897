"""Lightning: `Trainer(strategy="ddp", callbacks=[SieveCallback()])`.

`DDPStrategy(ddp_comm_hook=...)` is registered on CUDA only and ignored without a word elsewhere; a callback works on
both. A checkpoint of Lightning is one file, which rank 0 writes: so the ranks' states are gathered into it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp import attach
from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.integrations import resuming
from gradsieve.integrations.choosing import Choice, Exchanged
from gradsieve.integrations.clipping import multiply_limits, restore_limits
from gradsieve.recipes import Recipe
from gradsieve.sieve import Sieve

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            "gradsieve.integrations.lightning needs Lightning, which is not installed: pip install lightning"
        ) from error

CHECKPOINT_KEY = "gradsieve"
CLIPPING = {"clip_gradients": "clip_val"}  # of the precision plugin: norms and values, also of a user's own hook


class SieveCallback(Callback):
    """Attaches when training starts, saves and resumes with the trainer's checkpoints. Takes what `attach` takes.

    The updates of the trainer's optimizer are exchanged; with `exchange="gradients"`, its gradients. Where updates are,
    the trainer clips at `gradient_clip_val` times `sieve.clip_factor` while it trains.
    """

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        *,
        density: float | Schedule | None = None,
        exchange: Exchanged = "updates",
        **settings: Any,
    ) -> None:
        self._choice = Choice(recipe, density, exchange, settings)
        self._group: dist.ProcessGroup | None = None
        self._states: list[Any] | None = None  # of all ranks, from the checkpoint that is resumed from
        self._resumes = False
        self.sieve: Sieve | None = None  # once training has started

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model has been wrapped by now."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise InputError(
                f"SieveCallback needs DDP, got {type(trainer.strategy).__name__}: "
                'use Trainer(strategy="ddp", devices=...) with 2 devices or more in all'
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # half precision only
        self._group = model.process_group
        self.sieve = attach(model, **self._choice.for_attach(list(trainer.optimizers), scaler))
        if self._resumes:
            states, rank = self._states or [], self.sieve.engine.comm.rank
            resuming.load_together(
                self.sieve, states[rank] if rank < len(states) else None, self._group, "the checkpoint"
            )
        self._states, self._resumes = None, False
        multiply_limits(trainer.precision_plugin, CLIPPING, self.sieve)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The trainer's clipping is its own again."""
        restore_limits(trainer.precision_plugin, CLIPPING, self.sieve)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training has ended, too."""
        restore_limits(trainer.precision_plugin, CLIPPING, self.sieve)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """All ranks come here, and rank 0 writes."""
        if self.sieve is None:
            return
        comm = self.sieve.engine.comm
        states: list[Any] | None = [None] * comm.size if comm.rank == 0 else None
        dist.gather_object(self.sieve.state_dict(), states, group=self._group, group_dst=0)
        if states is not None:
            checkpoint[CHECKPOINT_KEY] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Comes before the model is wrapped: kept until training starts."""
        self._resumes = True
        self._states = checkpoint.get(CHECKPOINT_KEY)
