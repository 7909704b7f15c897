"""One worker's copy of the model under training, its gradients exchanged through the library."""

from __future__ import annotations

import hashlib
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradsieve.comm import Comm, CountingComm
from gradsieve.functional import sparse_allreduce
from gradsieve.lab.demo.corpus import Batch
from gradsieve.pipeline import PipelineState

# Chosen for dense exchange: of the settings tried, these brought its loss down furthest. Both runs use them.
LEARNING_RATE = 3e-3
BETAS = (0.5, 0.999)
RAMP_STEPS = 20
FINAL_RATE = 0.05
DENSE = "dense"


class Exchange(NamedTuple):
    """How gradients are averaged."""

    recipe: str
    density: float
    dense_steps: int  # the first steps, in which a new model's gradients change too fast to be held back


class Step(NamedTuple):
    """One training step on one rank."""

    loss: float
    seconds: float  # forward, backward, exchange, update
    exchange_seconds: float
    bytes_received: int


class Score(NamedTuple):
    """How well some held-out bytes were predicted; adds up over ranks."""

    loss_sum: float
    num_right: int
    num_bytes: int


class Replica:
    """Model, optimizer and the flat gradient that is exchanged."""

    def __init__(self, model: nn.Module, exchange: Exchange, steps: int, comm: Comm) -> None:
        self.model = model
        self._exchange = exchange
        self._steps_done = 0
        self._comm = CountingComm(comm)
        self._grad = _flat_gradient(model)
        self._state: PipelineState | None = None
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _rate(step, steps))

    def step(self, batch: Batch) -> Step:
        """Forward, backward, exchange, update."""
        self._comm.reset()
        started = time.perf_counter()
        self._grad.zero_()
        loss = cross_entropy(self.model(batch.contexts), batch.targets)
        torch.autograd.backward(loss)
        ready = time.perf_counter()
        self._average()
        exchanged = time.perf_counter()
        self._optimizer.step()
        self._schedule.step()
        finished = time.perf_counter()
        return Step(loss.item(), finished - started, exchanged - ready, self._comm.reset().bytes_received)

    def _average(self) -> None:
        """Over all ranks, in place."""
        recipe, density, dense_steps = self._exchange
        if self._steps_done < dense_steps:
            sparse_allreduce(self._grad, DENSE, density=1.0, comm=self._comm, out=self._grad)
        else:
            _, self._state = sparse_allreduce(
                self._grad, recipe, density=density, comm=self._comm, state=self._state, out=self._grad
            )
        self._steps_done += 1

    @torch.no_grad()
    def score(self, batch: Batch) -> Score:
        """On bytes that were not trained on."""
        scores = self.model(batch.contexts)
        loss = cross_entropy(scores, batch.targets, reduction="sum")
        right = (scores.argmax(dim=1) == batch.targets).sum()
        return Score(loss.item(), int(right), len(batch.targets))

    def digest(self) -> str:
        """Of all parameters, bit for bit."""
        hashed = hashlib.sha256()
        for parameter in self.model.parameters():
            hashed.update(parameter.detach().contiguous().numpy().tobytes())
        return hashed.hexdigest()


def _flat_gradient(model: nn.Module) -> Tensor:
    """One vector that all parameters' gradients are views of: what backward adds, the exchange sees."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _rate(step: int, steps: int) -> float:
    """Up in a straight line, down along a cosine."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return ramp * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps)))
