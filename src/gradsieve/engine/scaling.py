"""The loss scale of mixed precision: all that an exchange needs to know about a `GradScaler`."""

from __future__ import annotations

from typing import Protocol

from gradsieve.errors import InputError


class Scaler(Protocol):
    """The part of `torch.amp.GradScaler` that is used."""

    def get_scale(self) -> float:
        """Return the factor by which losses are multiplied now."""
        ...


def check_scaler(scaler: object) -> None:

    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InputError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")


def scale_of(scaler: Scaler | None) -> float:

    return 1.0 if scaler is None else scaler.get_scale()
