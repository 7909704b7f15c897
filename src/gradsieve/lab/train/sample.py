"""A sample of the probe: the measurements of one group in one step, on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm import Comm
from gradsieve.vector import SparseVector

BINS = 64
RANGE = 3.0  # the histogram covers this many times the largest threshold


@dataclass(frozen=True)
class Sample:
    """One group in one step, on one rank."""

    numel: int
    k: int
    selected: int
    delivered: int
    deviation: float  # |Topk(mean accumulated) - total / P|²
    gradient: float  # |mean gradient|²
    accumulated: float  # |accumulated|²
    left_exact: float  # the part of |accumulated|² outside the k largest entries
    left: float  # the part of |accumulated|² outside the selected entries
    histogram: dict[str, Any]


def take_sample(
    grad: Tensor, accumulated: Tensor, local: SparseVector, total: SparseVector, k: int, comm: Comm
) -> Sample:
    """Measure. All ranks call it together, since the means need an all_reduce each."""
    mean_grad = comm.all_reduce(grad.clone()) / comm.size
    mean = comm.all_reduce(accumulated.clone()) / comm.size
    deviation = _largest(mean, k) - total.to_dense() / comm.size
    exact = _largest(accumulated, k)
    return Sample(
        numel=accumulated.numel(),
        k=k,
        selected=local.nnz,
        delivered=total.nnz,
        deviation=_squared_norm(deviation),
        gradient=_squared_norm(mean_grad),
        accumulated=_squared_norm(accumulated),
        left_exact=_squared_norm(accumulated - exact),
        left=_squared_norm(accumulated - local.to_dense()),
        histogram=_histogram(accumulated, exact, local, k),
    )


def _histogram(accumulated: Tensor, exact: Tensor, local: SparseVector, k: int) -> dict[str, Any]:
    """Entries outside the range are counted in the outermost bins."""
    thresholds = {
        "exact": _smallest(exact[exact != 0]),
        "used": _smallest(local.values),
        "gaussian": _gaussian_threshold(accumulated, k),
    }
    reach = RANGE * max(thresholds.values()) or 1.0
    counts = torch.histc(accumulated.float().clamp(-reach, reach).cpu(), BINS, -reach, reach)
    return {"reach": reach, "counts": [int(count) for count in counts], "thresholds": thresholds}


def _gaussian_threshold(accumulated: Tensor, k: int) -> float:
    """The magnitude that k entries would exceed if all were normal with this mean and deviation."""
    share = min(1 - 1e-7, 1 - k / accumulated.numel())
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(share, dtype=torch.float64)))
    return abs(float(accumulated.mean())) + quantile * float(accumulated.std(correction=0))


def _largest(vector: Tensor, k: int) -> Tensor:
    """The k largest entries by magnitude, zero elsewhere."""
    indices = torch.topk(vector.abs(), k, sorted=False).indices
    return torch.zeros_like(vector).index_copy_(0, indices, vector[indices])


def _smallest(values: Tensor) -> float:
    return float(values.abs().min()) if values.numel() else 0.0


def _squared_norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
