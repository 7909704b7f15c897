"""The local model of one rank: the shared model minus this rank's undelivered updates, its offset.

At rest the parameters hold the shared model. So the model that a user evaluates, saves or compares is the same on every
rank, bit for bit. In a training step they hold the local model:
1. `ahead`, before a forward pass with gradients: parameters = shared - offset
2. `rest`, after the optimizer's step: offset += distance that the optimizer moved the parameters; parameters = shared
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsieve.kernels import moves
from gradsieve.updates.engine import UpdateEngine


class LocalModel:
    """Switches the parameters of one model on one rank between the shared and the local model."""

    def __init__(self, parameters: Mapping[str, Tensor], engine: UpdateEngine) -> None:
        self.parameters = dict(parameters)
        self.is_ahead = False
        self.is_paused = False  # while all ranks take the same steps: the parameters always hold the shared model
        self._engine = engine
        self._shares = engine.shared
        self._exchanged = False  # whether shared model or offset have changed since the parameters were written

    def before_step(self) -> None:
        """Let the optimizer step on the local model, and sample the gradients that it steps on."""
        if not self.is_paused:
            self._engine.sample_gradients()
            self.ahead()

    @torch.no_grad()
    def take_on(self) -> None:
        """At rest, copy the parameters to the shared model: the user may have loaded or changed them."""
        if not self.is_ahead:
            for name, parameter in self.parameters.items():
                _take_on_(self._shares[name].view(parameter.shape), parameter)

    @torch.no_grad()
    def ahead(self) -> None:
        """Write the local model to the parameters, as it is after the last exchange."""
        if not self.is_paused and (not self.is_ahead or self._exchanged):
            self.take_on()
            self._write_local()

    @torch.no_grad()
    def rest(self) -> None:
        """Add the distance that the parameters have moved to the offset, and write the shared model to them."""
        if self.is_ahead:
            self.is_ahead = False
            for name, parameter in self.parameters.items():
                _rest(self._shares[name], self._engine.offset(name), parameter)

    def pause(self) -> None:
        """Leave the parameters alone from now on. All residuals must have been delivered."""
        self.rest()
        self.is_paused = True

    def resume(self) -> None:
        """Step on the local model again, which is still the shared model."""
        self.take_on()
        self.is_paused = False

    def exchanged(self) -> None:
        """Note that an exchange has moved the shared model and the offset."""
        self._exchanged = True
        if not self.is_ahead:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self._shares[name].view(parameter.shape))

    def _write_local(self) -> None:
        for name, parameter in self.parameters.items():
            _ahead(self._shares[name], self._engine.offset(name), parameter)
        self.is_ahead, self._exchanged = True, False


def _ahead(shared: Tensor, offset: Tensor, parameter: Tensor) -> None:
    if _is_compiled_for(shared, parameter):
        moves.ahead(shared.numpy(), offset.numpy(), parameter.detach().view(-1).numpy())
    else:
        parameter.copy_((shared - offset).view(parameter.shape))


def _rest(shared: Tensor, offset: Tensor, parameter: Tensor) -> None:
    if _is_compiled_for(shared, parameter):
        moves.rest(shared.numpy(), offset.numpy(), parameter.detach().view(-1).numpy())
        return
    # Rounded as it was when written, so that the distance is exactly the optimizer's.
    before = (shared - offset).to(parameter.dtype)
    offset.add_(before.sub_(parameter.reshape(-1)))
    parameter.copy_(shared.view(parameter.shape))


def _is_compiled_for(shared: Tensor, parameter: Tensor) -> bool:
    return shared.device.type == "cpu" and parameter.dtype == shared.dtype and parameter.is_contiguous()


def _take_on_(shared: Tensor, parameter: Tensor) -> None:
    """Copy a parameter to the shared model, except where it is the rounded value of the shared model."""
    if parameter.dtype == shared.dtype:
        shared.copy_(parameter)
    else:
        changed = shared.to(parameter.dtype) != parameter
        shared.copy_(torch.where(changed, parameter.to(shared.dtype), shared))
