"""Adam and AdamW for ranks that step on their own gradients and exchange their updates.

Dense training divides by the root of v = E[mean gradient²]. A rank that steps on its own gradient has E[own gradient²],
which is larger: own = signal + noise, and averaging over P ranks divides the noise's variance by P. With q the signal's
share of the own gradient's mean square,

    E[mean gradient²] = (q + (1 - q) / P) E[own gradient²].

Without the correction every update of a small-batch run is up to sqrt(P) times too small.
1. q is estimated for each parameter from successive steps: the noise of this step's gradient is independent of the
   first moment so far, so <gradient, first moment> / <gradient, gradient> is the signal's share. Nothing is sent.
2. The denominator sqrt(v) is multiplied by sqrt(q + (1 - q) / P); everything else is torch's own step.

Multiplying the denominator by c is the same as dividing rate and epsilon by c and multiplying decoupled weight decay by
c, so torch's fused and foreach kernels do the work: one call for all parameters whose c rounds to the same level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsieve.updates.own import OwnGradients

LEVELS_PER_DOUBLING = 16  # of the correction: 4 % apart, far below what the estimate is good for; more makes more calls
MEMORY = 0.95  # of the share's two averages, per measurement; more smooths over more steps
ALWAYS_MEASURED = 32  # steps at the start; after them one step in MEASURED_EVERY, since measuring reads two vectors
MEASURED_EVERY = 4


class CorrectedMoments(OwnGradients):
    """Mixed into torch's Adam or AdamW: corrects second moments once a sieve has said how many ranks there are."""

    _plain_step: Callable[..., Any]  # torch's own, without the hooks that torch wraps around it
    _levels: dict[Tensor, tuple[Any, int]] | None = None  # of corrections, with what each was computed from

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
        self._measure()
        whole = self.param_groups
        self.param_groups = [part for group in whole for part in self._by_level(group)]
        try:
            type(self)._plain_step(self)
        finally:
            self.param_groups = whole
        return loss

    def signal_share(self, parameter: Tensor) -> float:
        """The signal's estimated share of the mean square of a parameter's own gradients; 1 before any estimate."""
        state = self.state.get(parameter, {})
        energy = state.get("gradient_energy", 0.0)
        return min(1.0, max(0.0, state["signal_energy"] / energy)) if energy > 0 else 1.0

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
        """Of a parameter's correction. Computed again only if what it depends on has changed."""
        state = self.state.get(parameter, {})
        basis = self._num_ranks, state.get("signal_energy"), state.get("gradient_energy")
        if self._levels is None:
            self._levels = {}
        known = self._levels.get(parameter)
        if known is not None and known[0] == basis:
            return known[1]
        share = self.signal_share(parameter)
        correction = math.sqrt(share + (1 - share) / self._num_ranks)
        level = round(LEVELS_PER_DOUBLING * math.log2(correction))
        self._levels[parameter] = basis, level
        return level

    def _measure(self) -> None:
        """Add this step to the averages behind `signal_share`; all parameters in one transfer to main memory."""
        measured: list[tuple[dict[str, Any], float]] = []
        products: list[Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None or "exp_avg" not in state:
                    continue
                steps = state["steps_counted"] = _steps_counted(state)
                if steps >= ALWAYS_MEASURED and steps % MEASURED_EVERY:
                    continue
                grad, moment = parameter.grad.reshape(-1).float(), state["exp_avg"].reshape(-1).float()
                weight = (-1.0 if group["maximize"] else 1.0) / (1 - group["betas"][0] ** steps)
                products += [torch.dot(grad, moment), torch.dot(grad, grad)]
                measured.append((state, weight))
        figures = torch.stack(products).tolist() if products else []
        for (state, weight), signal, energy in zip(measured, figures[::2], figures[1::2], strict=True):
            if math.isfinite(signal) and math.isfinite(energy):
                for name, new in (("signal_energy", weight * signal), ("gradient_energy", energy)):
                    state[name] = MEMORY * state.get(name, 0.0) + (1 - MEMORY) * new


def _steps_counted(state: Mapping[str, Any]) -> int:
    """Steps that the moments have seen. Torch's own count may be on a GPU, where reading waits: it is read once."""
    counted: int | None = state.get("steps_counted")
    return int(state["step"]) if counted is None else counted + 1


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Torch wraps `step` of every class it has made an object of; hooks must run once, around ours."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class AdamW(CorrectedMoments, torch.optim.AdamW):
    """`torch.optim.AdamW` for a model whose updates a sieve exchanges.

    Same arguments, same meaning of `lr`, `betas`, `eps` and `weight_decay`, same state and the same speed. With no
    sieve, or with one rank, it is `torch.optim.AdamW` bit for bit.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = gradsieve.AdamW(model.parameters(), lr=1e-3)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
    """

    _plain_step = _without_hooks(torch.optim.AdamW.step)


class Adam(CorrectedMoments, torch.optim.Adam):
    """`torch.optim.Adam` for a model whose updates a sieve exchanges; see `AdamW`."""

    _plain_step = _without_hooks(torch.optim.Adam.step)
