"""The loss scale of mixed precision, as far as an exchange must know it."""

from __future__ import annotations

from typing import Protocol

from gradsieve.errors import InputError


class Scaler(Protocol):
    """What is asked of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """By how much losses are multiplied now."""
        ...


def check_scaler(scaler: object) -> None:
    """None, or something that has a scale."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InputError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")


def scale_of(scaler: Scaler | None) -> float:
    """One where nothing is scaled."""
    return 1.0 if scaler is None else scaler.get_scale()
