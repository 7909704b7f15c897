"""The hot loops behind plain functions, picked by where the data lives.

`reference` is the definition, in torch operations, for any device; `cpu` is compiled, for float32 and float64 in main
memory. Callers use the functions of `kernels(tensor)` and never ask which they got.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from gradsieve.kernels import cpu, reference
from gradsieve.kernels.reference import Entries, index_dtype

__all__ = ["Entries", "Kernels", "index_dtype", "kernels"]


class Kernels(Protocol):
    """What each kernel module offers; `reference` says what each function means."""

    def accumulate(
        self, residual: Tensor, grad: Tensor, out: Tensor, floor: float | None, expected: int
    ) -> Entries | None: ...
    def compact(self, x: Tensor, floor: float, expected: int) -> Entries: ...
    def kth_magnitude(self, x: Tensor, k: int) -> float: ...
    def cut(self, indices: Tensor, values: Tensor, k: int) -> tuple[Entries, Entries]: ...
    def merge(self, a: Entries, b: Entries) -> Entries: ...
    def exclude(self, entries: Entries, other: Tensor) -> Entries: ...
    def first_disorder(self, indices: Tensor, low: int, high: int) -> int: ...
    def write_sparse_(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...
    def scatter_add_(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...
    def settle_(self, accumulated: Tensor, sent: Tensor, leftover: Entries) -> None: ...
    def descending_points(self, values: Tensor, ranks: Tensor) -> Tensor: ...
    def moments(self, x: Tensor) -> tuple[float, float]: ...


def kernels(*tensors: Tensor) -> Kernels:
    """The fastest kernels that can work on all of these tensors."""
    compiled = all(t.device.type == "cpu" and t.dtype in cpu.DTYPES for t in tensors)
    return cast(Kernels, cpu if compiled else reference)
