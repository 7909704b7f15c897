"""The arguments that all callbacks share, and those that they pass to `attach`."""

from __future__ import annotations

from typing import Any, Literal

from gradsieve.engine.schedules import Schedule
from gradsieve.errors import InputError
from gradsieve.recipes import Recipe

Exchanged = Literal["updates", "gradients"]


class Choice:
    """Arguments of `attach`, kept until the framework has wrapped the model and made an optimizer."""

    def __init__(
        self,
        recipe: str | Recipe | None,
        density: float | Schedule | None,
        exchange: Exchanged,
        settings: dict[str, Any],
    ) -> None:
        if exchange not in ("updates", "gradients"):
            raise InputError(f"exchange must be 'updates' or 'gradients', got {exchange!r}")
        self._exchange = exchange
        self._settings = {"recipe": recipe, "density": density, **settings}

    def for_attach(self, optimizers: list[Any], scaler: Any) -> dict[str, Any]:
        """Return the keyword arguments of `attach` for the framework's optimizers and scaler."""
        if self._exchange == "gradients":
            return {"scaler": scaler, **self._settings}
        if len(optimizers) != 1:
            raise InputError(
                f"the updates of one optimizer can be exchanged, and this trainer has {len(optimizers)}: "
                'give SieveCallback exchange="gradients" and a density'
            )
        return {"optimizer": optimizers[0], **self._settings}
