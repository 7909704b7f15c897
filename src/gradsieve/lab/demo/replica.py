"""One worker's copy of the model under training, its gradients exchanged through the library."""

from __future__ import annotations

import hashlib
import math
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradsieve.comm import Comm, CountingComm
from gradsieve.functional import sparse_allreduce
from gradsieve.lab.demo.corpus import Batch
from gradsieve.lab.demo.flat import Adam, FlatModel
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
    dense_steps: int  # before the recipe takes over


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
    """Model and optimizer, with the gradient exchanged in between."""

    def __init__(self, model: nn.Module, exchange: Exchange, steps: int, comm: Comm) -> None:
        self._flat = FlatModel(model)
        self._adam = Adam(self._flat.values.numel(), BETAS)
        self._exchange = exchange
        self._steps, self._steps_done = steps, 0
        self._comm = CountingComm(comm)
        self._state: PipelineState | None = None

    def step(self, batch: Batch) -> Step:
        """Forward, backward, exchange, update."""
        self._comm.reset()
        started = time.perf_counter()
        self._flat.grad.zero_()
        loss = cross_entropy(self._flat.model(batch.contexts), batch.targets)
        torch.autograd.backward(loss)
        ready = time.perf_counter()
        self._average()
        exchanged = time.perf_counter()
        self._adam.step(self._flat.values, self._flat.grad, LEARNING_RATE * _rate(self._steps_done, self._steps))
        self._steps_done += 1
        finished = time.perf_counter()
        return Step(loss.item(), finished - started, exchanged - ready, self._comm.reset().bytes_received)

    def _average(self) -> None:
        """Over all ranks, in place."""
        grad = self._flat.grad
        recipe, density, dense_steps = self._exchange
        if self._steps_done < dense_steps:
            sparse_allreduce(grad, DENSE, density=1.0, comm=self._comm, out=grad)
        else:
            _, self._state = sparse_allreduce(
                grad, recipe, density=density, comm=self._comm, state=self._state, out=grad
            )

    @torch.no_grad()
    def score(self, batch: Batch) -> Score:
        """On bytes that were not trained on."""
        scores = self._flat.model(batch.contexts)
        loss = cross_entropy(scores, batch.targets, reduction="sum")
        right = (scores.argmax(dim=1) == batch.targets).sum()
        return Score(loss.item(), int(right), len(batch.targets))

    def digest(self) -> str:
        """Of all parameters, bit for bit."""
        return hashlib.sha256(self._flat.values.numpy().tobytes()).hexdigest()


def _rate(step: int, steps: int) -> float:
    """Up in a straight line, down along a cosine."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return ramp * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps)))
