"""Measures how much of a rank's own gradient all ranks have in common: the signal's share, which Adam's steps need.

own gradient = signal + noise, and the noise of different ranks is independent. So the signal's share of the own
gradient's mean square is q = <own gradient, another rank's gradient> / <own gradient, own gradient>.
1. In a measured step each rank takes every n-th entry of its gradients, at the same positions on all ranks.
2. One all_reduce adds these entries, and their squares, over all ranks.
3. With E[mean²] = (q + (1 - q) / P) E[own²], both averages give q for each parameter.

Successive gradients of one rank would need no message: their noise is independent, too. But they understate q: the
signal turns from step to step, and at large learning rates it even changes sign (docs/optimizers.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve.comm import Comm

MOST_ENTRIES = 128  # per parameter and measurement; more is more exact and sends more
LEAST_ENTRIES = 8
SHARE = 128  # one entry in this many, between these limits
MEMORY = 0.95  # of the averages behind q, per measurement; more smooths over more steps
ALWAYS_MEASURED = 32  # exchanges at the start that are all measured
MEASURED_EVERY = 8  # after them, one exchange in this many
SIGNAL, ENERGY = "signal_energy", "gradient_energy"  # in the optimizer's state: the averages whose quotient is q


def needs_signal(optimizer: Optimizer) -> bool:
    """Whether the optimizer has second moments to correct, or may have after `Sieve.adapt`; the same on every rank."""
    return isinstance(optimizer, torch.optim.Adam)  # AdamW is one


def signal_fact(optimizer: Optimizer | None) -> dict[str, str]:
    """Return what ranks compare when they start: all of them measure, or none."""
    return {"measuring of the gradients' signal": repr(optimizer is not None and needs_signal(optimizer))}


def is_measured(number: int) -> bool:
    """Whether this exchange of a run is measured; the same on every rank."""
    return number < ALWAYS_MEASURED or number % MEASURED_EVERY == 0


NO_SAMPLE = torch.zeros(0)


class SignalMeter:
    """Takes samples of one rank's gradients, adds them over all ranks, and keeps the averages in the optimizer."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._parameters = tuple(parameters.values())
        self._optimizer = optimizer
        self._counts = [_num_entries(parameter.numel()) for parameter in self._parameters]
        self.sample = NO_SAMPLE  # this rank's, not yet exchanged; saved with the optimizer's state

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Take a sample of the gradients as they are now, for exchange `number`, if that one is measured."""
        if is_measured(number):
            parts = [self._entries(index, number) for index in range(len(self._parameters))]
            # The leading one counts the ranks that have a sample: a rank may have skipped its step.
            self.sample = torch.cat([torch.ones(1), torch.cat(parts).to(device="cpu", dtype=torch.float32)])

    @torch.no_grad()
    def exchange(self, number: int, comm: Comm) -> None:
        """Add the samples of all ranks, if exchange `number` is measured. All ranks call it together."""
        sample, self.sample = self.sample, NO_SAMPLE
        if comm.size == 1 or not is_measured(number):
            return
        if not sample.numel():
            sample = torch.zeros(1 + sum(self._counts))
        squares = torch.stack([part.square().sum() for part in torch.split(sample[1:], self._counts)])
        summed = comm.all_reduce(torch.cat([sample, squares]))
        if summed[0] == comm.size and bool(torch.isfinite(summed).all()):
            self._average(summed[1:], comm.size)

    def _average(self, summed: Tensor, size: int) -> None:
        entries, squares = torch.split(summed, [sum(self._counts), len(self._counts)])
        energies = (squares / size).tolist()
        means = torch.stack([part.square().sum() for part in torch.split(entries / size, self._counts)]).tolist()
        for parameter, energy, mean in zip(self._parameters, energies, means, strict=True):
            state = self._optimizer.state[parameter]
            if not state:  # torch would take a state with entries of ours for one that it has made
                continue
            signal = (size * mean - energy) / (size - 1)
            for name, new in ((SIGNAL, signal), (ENERGY, energy)):
                state[name] = MEMORY * state.get(name, 0.0) + (1 - MEMORY) * new

    def _entries(self, index: int, number: int) -> Tensor:
        """Entries at equal distances, beginning at a position that moves from measurement to measurement."""
        parameter, count = self._parameters[index], self._counts[index]
        if parameter.grad is None:
            return torch.zeros(count, dtype=parameter.dtype, device=parameter.device)
        distance = parameter.numel() // count
        first = number * 2654435761 % distance  # Knuth's multiplicative hash
        return parameter.grad.reshape(-1)[first : first + distance * count : distance]


def _num_entries(numel: int) -> int:
    return min(numel, max(LEAST_ENTRIES, min(MOST_ENTRIES, numel // SHARE)))
