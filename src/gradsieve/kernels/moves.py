"""Moving a parameter from the shared to the local model and back, in one pass each; compiled, for main memory.

The operations and their order are those of torch, so that results are the same bit for bit.
"""

from __future__ import annotations

from typing import Any

from gradsieve.kernels.bits import compiled


@compiled
def ahead(shared: Any, offset: Any, parameter: Any) -> None:
    """`parameter = shared - offset`."""
    for j in range(parameter.size):
        parameter[j] = shared[j] - offset[j]


@compiled
def rest(shared: Any, offset: Any, parameter: Any) -> None:
    """`offset += (shared - offset) - parameter; parameter = shared`."""
    for j in range(parameter.size):
        before = shared[j] - offset[j]
        offset[j] += before - parameter[j]
        parameter[j] = shared[j]
