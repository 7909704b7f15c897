"""GRACE's top-k with error feedback (github.com/sands-lab/grace), where the package `grace_dl` can be imported.

GRACE is on no package index: clone it and put it on `PYTHONPATH`.
"""

# No `from __future__ import annotations`: DDP reads the annotations of a hook and refuses strings.

import importlib.util
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.lab.baselines.baseline import WHOLE_MODEL_MB, Baseline, Hook, Shapes

GRACE_DENSITY = 0.01


def grace_baselines() -> dict[str, Baseline]:
    """The baseline by its name; nothing if GRACE is not installed."""
    if importlib.util.find_spec("grace_dl") is None:
        return {}
    return {"grace-topk": Baseline("GRACE, top-k of 1 %", _grace_topk, WHOLE_MODEL_MB, bytes_received=_grace_bytes)}


def _grace_topk(start: int) -> tuple[Any, Hook]:
    """Set up as in GRACE's examples: top-k of each parameter, an all_gather, a residual per parameter."""
    from grace_dl.dist.communicator.allgather import Allgather
    from grace_dl.dist.compressor.topk import TopKCompressor
    from grace_dl.dist.memory.residual import ResidualMemory

    communicator = Allgather(TopKCompressor(GRACE_DENSITY), ResidualMemory(), dist.get_world_size())
    return communicator, _grace_hook


def _grace_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        grad.copy_(state.step(grad, id(parameter)))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _grace_bytes(shapes: Shapes, size: int) -> float:
    return (size - 1) * sum(8 * max(1, int(GRACE_DENSITY * prod(shape))) for shape in shapes)
