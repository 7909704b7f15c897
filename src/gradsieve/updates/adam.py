"""Adam and AdamW for ranks that step on their own gradients and exchange their updates.

Dense training divides by the root of v = E[mean gradient²]. A rank that steps on its own gradient has E[own gradient²],
which is larger: own = signal + noise, and the mean over P ranks has 1 / P of the noise's variance. Let q be the
signal's share of the own gradient's mean square. Then

    E[mean gradient²] = (q + (1 - q) / P) E[own gradient²].

Without a correction, each update of a small-batch run is up to sqrt(P) times too small.
1. q is measured for each parameter, from a sample of all ranks' gradients (`signal.py`).
2. The denominator sqrt(v) is multiplied by sqrt(q + (1 - q) / P). Everything else is torch's own step.

To multiply the denominator by c is the same as to divide learning rate and epsilon by c and to multiply decoupled
weight decay by c. So torch's fused and foreach kernels do the work, with one call for all parameters whose c rounds to
the same level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.updates.own import OwnGradients
from gradsieve.updates.signal import ENERGY, SIGNAL

LEVELS_PER_DOUBLING = 16  # of the correction: 4 % apart, far below the error of the estimate; more makes more calls


class CorrectedMoments(OwnGradients):
    """Mixin for torch's Adam and AdamW: corrects second moments once `for_ranks` has set the number of ranks."""

    _plain_step: Callable[..., Any]  # torch's own step, without the hooks that torch wraps around it
    _levels: dict[Tensor, tuple[Any, int]] | None = None  # the level of each correction, and its inputs

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._num_ranks == 1:
            type(self)._plain_step(self)
            return loss
        whole = self.param_groups
        self.param_groups = [part for group in whole for part in self._by_level(group)]
        try:
            type(self)._plain_step(self)
        finally:
            self.param_groups = whole
        return loss

    def signal_share(self, parameter: Tensor) -> float:
        """Return the estimate of q for a parameter; 1 before the first measurement."""
        state = self.state.get(parameter, {})
        energy = state.get(ENERGY, 0.0)
        return min(1.0, max(0.0, state[SIGNAL] / energy)) if energy > 0 else 1.0

    @override
    def share_of_mean(self, parameter: Tensor, num_ranks: int) -> float:
        share = self.signal_share(parameter)
        return share + (1 - share) / num_ranks

    def _by_level(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        levels: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            levels.setdefault(self._level(parameter), []).append(parameter)
        decoupled = isinstance(self, torch.optim.AdamW)
        for level, parameters in levels.items():
            factor = 2.0 ** (level / LEVELS_PER_DOUBLING)
            part = {**group, "params": parameters, "lr": group["lr"] / factor, "eps": group["eps"] / factor}
            if decoupled:
                part["weight_decay"] = group["weight_decay"] * factor
            yield part

    def _level(self, parameter: Tensor) -> int:
        """Return the level of a parameter's correction, computed again only if its inputs have changed."""
        state = self.state.get(parameter, {})
        basis = self._num_ranks, state.get(SIGNAL), state.get(ENERGY)
        if self._levels is None:
            self._levels = {}
        known = self._levels.get(parameter)
        if known is not None and known[0] == basis:
            return known[1]
        level = round(LEVELS_PER_DOUBLING * math.log2(math.sqrt(self.share_of_mean(parameter, self._num_ranks))))
        self._levels[parameter] = basis, level
        return level


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap torch's `step`. Torch wraps it once the class has been used, and hooks must run once, around ours."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class AdamW(CorrectedMoments, torch.optim.AdamW):
    """`torch.optim.AdamW` for a model whose updates are exchanged.

    It corrects the second moments for the noise of a single rank's gradient. Arguments, state and speed are those of
    `torch.optim.AdamW`. Without a sieve, or with one rank, it is `torch.optim.AdamW` bit for bit.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate.
        betas: Decay of the first and the second moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad, maximize, foreach, capturable, differentiable, fused: As for `torch.optim.AdamW`.

    Example:
        >>> import gradsieve
        >>> optimizer = gradsieve.AdamW(model.parameters(), lr=1e-3)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
    """

    _plain_step = _without_hooks(torch.optim.AdamW.step)


class Adam(CorrectedMoments, torch.optim.Adam):
    """`torch.optim.Adam` for a model whose updates are exchanged.

    It corrects the second moments for the noise of a single rank's gradient. Arguments, state and speed are those of
    `torch.optim.Adam`. Without a sieve, or with one rank, it is `torch.optim.Adam` bit for bit.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate.
        betas: Decay of the first and the second moments.
        eps: Added to the denominator.
        weight_decay: This multiple of the parameters is added to the gradient.
        amsgrad, foreach, maximize, capturable, differentiable, fused, decoupled_weight_decay: As for
            `torch.optim.Adam`.

    Example:
        >>> import gradsieve
        >>> optimizer = gradsieve.Adam(model.parameters(), lr=1e-3)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
    """

    _plain_step = _without_hooks(torch.optim.Adam.step)
