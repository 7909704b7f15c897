"""Lightning: `Trainer(strategy="ddp", callbacks=[SieveCallback()])`.

`DDPStrategy(ddp_comm_hook=...)` is registered on CUDA only, and silently ignored elsewhere. A callback works on both. A
checkpoint of Lightning is one file, which rank 0 writes. So the states of all ranks are gathered into it.
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
CLIPPING = {"clip_gradients": "clip_val"}  # of the precision plugin: norms and values, including a user's own hook


class SieveCallback(Callback):
    """Attaches a sieve when training starts, and saves and resumes with the trainer's checkpoints.

    If updates are exchanged, the trainer clips at `gradient_clip_val` times `sieve.clip_factor` while it trains. The
    attribute `sieve` is the handle, once training has started.

    Args:
        recipe: As for `attach`.
        density: As for `attach`.
        exchange: "updates" of the trainer's optimizer, or "gradients".
        **settings: Further keyword arguments of `attach`.

    Raises:
        InputError: `exchange` is neither of the two.

    Example::

        Trainer(strategy="ddp", devices=4, callbacks=[SieveCallback()])
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
        self._states: list[Any] | None = None  # the states of all ranks, from the checkpoint to resume from
        self._resumes = False
        self.sieve: Sieve | None = None  # once training has started

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the model has been wrapped by now."""
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
        """Restore the trainer's clipping."""
        restore_limits(trainer.precision_plugin, CLIPPING, self.sieve)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the trainer's clipping, since training has ended."""
        restore_limits(trainer.precision_plugin, CLIPPING, self.sieve)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Gather the states of all ranks, for the file that rank 0 writes."""
        if self.sieve is None:
            return
        comm = self.sieve.engine.comm
        states: list[Any] | None = [None] * comm.size if comm.rank == 0 else None
        dist.gather_object(self.sieve.state_dict(), states, group=self._group, group_dst=0)
        if states is not None:
            checkpoint[CHECKPOINT_KEY] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the states until training starts: the model has not been wrapped yet."""
        self._resumes = True
        self._states = checkpoint.get(CHECKPOINT_KEY)
