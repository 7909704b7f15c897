"""What is to be trained: a number of parameters and a computing time, or a model of the user's."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.ddp.entry import DEFAULT_GROUP_MB
from gradsieve.engine.groups import BYTES_PER_MB, cut_into_groups
from gradsieve.engine.rules import Rules
from gradsieve.errors import InputError
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.models.shape import count_parameters
from gradsieve.lab.tune.method import rules_of
from gradsieve.lab.tune.stand_in import FORWARD_SHARE, Shapes, StandIn, stand_in_shapes

BUCKET_MB = 25.0  # of DDP
TIMED_PASSES = 5
RETURNS = "must return a pair (model, loss), where loss(model) runs one batch and returns a scalar tensor"

Loss = Callable[[nn.Module], Tensor]


class Groups(NamedTuple):
    """How a model is cut."""

    sparse: list[int]  # entries of the groups that are exchanged sparsely, in order
    whole: int  # entries that are sent whole, all in one all_reduce


@dataclass(frozen=True)
class Job:
    """One training step, without any exchange."""

    shapes: Shapes  # of the parameters, in the order of their registration
    forward_seconds: float
    backward_seconds: float
    on_processor: bool = False  # whether it computes on the processor that also exchanges

    @cached_property
    def numel(self) -> int:
        return sum(int(torch.Size(shape).numel()) for shape in self.shapes)

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def groups(self, *, of_updates: bool) -> Groups:
        """The groups that `attach` cuts with the rules for gradients, or with those for Adam's updates."""
        return self._update_groups if of_updates else self._gradient_groups

    @cached_property
    def _gradient_groups(self) -> Groups:
        return self._cut(rules_of(of_updates=False))

    @cached_property
    def _update_groups(self) -> Groups:
        return self._cut(rules_of(of_updates=True))

    def _cut(self, rules: Rules) -> Groups:
        tensors = {str(number): torch.empty(shape, device="meta") for number, shape in enumerate(self.shapes)}
        groups = cut_into_groups(tensors, rules, DEFAULT_GROUP_MB)
        whole = sum(group.numel for group in groups if not group.sparse)
        return Groups([group.numel for group in groups if group.sparse], whole)

    def num_buckets(self) -> int:
        """About how many buckets DDP makes: 1 MB first, then 25 MB each."""
        return 1 + -(-max(0, 4 * self.numel - BYTES_PER_MB) // int(BUCKET_MB * BYTES_PER_MB))


def stand_in_job(numel: int, compute_seconds: float) -> Job:
    forward = FORWARD_SHARE * compute_seconds
    return Job(stand_in_shapes(numel), forward, compute_seconds - forward)


class Work(NamedTuple):
    """A model and what it does in one step."""

    model: nn.Module
    loss: Loss


def stand_in_work(numel: int, compute_seconds: float, rank: int) -> Work:
    gradients = Gradients(numel, rank=rank)
    return Work(StandIn(numel, compute_seconds), lambda model: model(gradients.fresh()))


def find_function(name: str) -> Callable[[], Any]:
    """The function of `module:function`, looked for from the current folder as well."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"--model must be module:function, such as train:build, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise InputError(f"--model {name}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise InputError(f"--model {name}: module {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]


def model_work(name: str) -> Work:
    """Call the user's function. The seed is the same on all ranks, so that they start with equal parameters."""
    function = find_function(name)
    torch.manual_seed(0)
    try:
        made = function()
    except Exception as error:
        raise InputError(f"--model {name}: the function failed ({type(error).__name__}: {error})") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise InputError(f"--model {name}: {function.__name__}() {RETURNS}, got {type(made).__name__}")
    model, loss = made
    if count_parameters(model) == 0:
        raise InputError(f"--model {name}: the model has no parameters that require gradients")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise InputError(
            f"--model {name}: models are timed on the CPU here: for a GPU, give --parameters and --compute-seconds"
        )
    torch.manual_seed(1 + dist.get_rank())
    return Work(model, loss)


def model_job(work: Work, name: str) -> Job:
    """Time the passes of a user's model on all ranks at once; the first pass is not counted."""
    passes = [_passes(work, name) for _ in range(1 + TIMED_PASSES)][1:]
    seconds = torch.tensor([statistics.median(times) for times in zip(*passes, strict=True)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    shapes = [tuple(parameter.shape) for parameter in work.model.parameters() if parameter.requires_grad]
    forward, backward = seconds.tolist()
    return Job(shapes, forward, backward, on_processor=True)


def _passes(work: Work, name: str) -> tuple[float, float]:
    work.model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    try:
        loss = work.loss(work.model)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InputError(f"--model {name}: a training step failed ({type(error).__name__}: {error})") from error
    return middle - began, time.perf_counter() - middle
