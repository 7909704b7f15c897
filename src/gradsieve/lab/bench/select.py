"""Time of selection with error feedback in one process: accumulate and select, as in `Pipeline.step`.

Settling is done but not timed, so that the next step has a real residual and a threshold that is one step old. The
median over many steps is that of an ordinary step. Rare steps that compute their threshold again are in `raw_seconds`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradsieve.feedback import Residual
from gradsieve.lab.bench.contest import RESIDUAL_WARMUP_STEPS, Contender, Progress, contest, silent
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.report import Column, Report, Row, environment, milliseconds, thousands, times
from gradsieve.lab.machine import require_memory
from gradsieve.selectors import SELECTORS, Selector
from gradsieve.vector import SparseVector
from gradsieve.vector.pieces import Pieces

TORCH_TOPK, ADD = "torch.topk", "add_"

COLUMNS = (
    Column("method", "method"),
    Column("numel", "numel", thousands),
    Column("density", "density"),
    Column("threads", "threads"),
    Column("seconds", "time per step", milliseconds),
    Column("ratio_to_add_", "vs add_", times),
    Column("speedup_over_torch.topk", "speedup over torch.topk", times),
    Column("picked_over_k", "selected / k", "{:.2f}".format),
)


@dataclass(frozen=True)
class SelectPlan:
    """What to measure: every combination."""

    methods: Sequence[str]
    numels: Sequence[int]
    densities: Sequence[float]
    threads: Sequence[int]
    repeats: int


class Selected(NamedTuple):
    """Measurements of one step."""

    seconds: float
    nnz: int


class SieveContender(Contender[Selected]):
    """Error feedback and a selector of this library."""

    warmup_steps = RESIDUAL_WARMUP_STEPS

    def __init__(self, selector: Selector[Any], grad: Tensor, k: int) -> None:
        self.selector = selector
        self.k = k
        self._residual = Residual()
        self._feedback_state = self._residual.init(Pieces([grad]))
        self._selector_state = selector.init(grad.numel())
        self._elsewhere = Pieces([torch.empty_like(grad)])  # accumulating into the gradient's own memory clears it

    @override
    def step(self, grad: Tensor) -> Selected:
        """Accumulate and select, timed; then settle as if all selected entries had been delivered."""
        started = time.perf_counter()
        floor = self.selector.floor(self._selector_state)
        pieces = Pieces([grad])
        accumulated, candidates, _ = self._residual.accumulate(
            pieces, self._elsewhere, self._feedback_state, floor, self.k
        )
        local, self._selector_state = self.selector(accumulated, self.k, self._selector_state, candidates)
        seconds = time.perf_counter() - started
        nothing = SparseVector.empty(local.numel, local.values)
        self._feedback_state = self._residual.settle(accumulated, pieces, local, nothing, self._feedback_state)
        return Selected(seconds, local.nnz)


class TorchTopkContender(Contender[Selected]):
    """The usual implementation: add the gradient to the residual, then `torch.topk` of the magnitudes."""

    warmup_steps = 2

    def __init__(self, grad: Tensor, k: int) -> None:
        self.k = k
        self._residual = torch.zeros_like(grad)

    @override
    def step(self, grad: Tensor) -> Selected:
        started = time.perf_counter()
        self._residual.add_(grad)
        _, indices = torch.topk(self._residual.abs(), self.k)
        seconds = time.perf_counter() - started
        self._residual[indices] = 0
        return Selected(seconds, self.k)


class AddContender(Contender[Selected]):
    """The lower bound for error feedback: one pass that adds the gradient."""

    warmup_steps = 2

    def __init__(self, grad: Tensor) -> None:
        self._residual = torch.zeros_like(grad)

    @override
    def step(self, grad: Tensor) -> Selected:
        started = time.perf_counter()
        self._residual.add_(grad)
        return Selected(time.perf_counter() - started, 0)


def bench_select(plan: SelectPlan, progress: Progress = silent) -> Report:
    """Measure all combinations. `torch.topk` and `add_` are always among the rows."""
    selectors = {name: SELECTORS[name] for name in plan.methods}
    # The gradients, three vectors per method, one for torch.topk and one for add_, and the temporaries of torch.topk.
    vectors = 1 + 3 * len(selectors) + 2 + 4
    require_memory(4 * vectors * max(plan.numels), "use a smaller --numel or fewer --method")
    before = torch.get_num_threads()
    rows: list[Row] = []
    try:
        for numel in plan.numels:
            gradients = Gradients(numel)
            for density in plan.densities:
                for threads in plan.threads:
                    torch.set_num_threads(threads)
                    cell: Row = {"numel": numel, "density": density, "ranks": 1, "threads": threads}
                    rows += _measured(cell, selectors, gradients, plan.repeats, progress)
    finally:
        torch.set_num_threads(before)
    return Report(environment(), rows)


def _measured(
    cell: Row, selectors: dict[str, Any], gradients: Gradients, repeats: int, progress: Progress
) -> list[Row]:
    grad = gradients.fresh()
    k = max(1, round(cell["numel"] * cell["density"]))
    contenders: dict[str, Contender[Selected]] = {
        name: SieveContender(selector(), grad, k) for name, selector in selectors.items()
    }
    contenders |= {TORCH_TOPK: TorchTopkContender(grad, k), ADD: AddContender(grad)}
    what = f"numel {cell['numel']:,}, density {cell['density']:g}, {cell['threads']} thread(s)"
    samples = contest(what, contenders, gradients, repeats, progress)
    medians = {name: statistics.median(s.seconds for s in steps) for name, steps in samples.items()}
    return [
        {
            "method": name,
            **cell,
            "k": k,
            "repeats": repeats,
            "step": "ordinary",
            "seconds": medians[name],
            "ratio_to_add_": medians[name] / medians[ADD],
            "speedup_over_torch.topk": medians[TORCH_TOPK] / medians[name],
            **({} if name == ADD else {"picked_over_k": statistics.median(s.nnz for s in steps) / k}),
            "raw_seconds": [s.seconds for s in steps],
        }
        for name, steps in samples.items()
    ]
