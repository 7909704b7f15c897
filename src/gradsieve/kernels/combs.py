"""Every m-th entry of a vector, assigned to P ranks in turn; compiled, for float32 and float64 in main memory.

Each function passes over the vector once, in order. Strided views of torch would pass over it once per rank.
Entry (q * P + p) * m + j of the vector is entry p * rounds + q of comb j.
"""

from __future__ import annotations

from typing import Any

from gradsieve.kernels.bits import compiled


@compiled
def gather(vector: Any, number: int, of: int, ranks: int, rounds: int, values: Any) -> None:
    """`values = comb of vector`."""
    for q in range(rounds):
        at = q * ranks * of + number
        for p in range(ranks):
            values[p * rounds + q] = vector[at + p * of]


@compiled
def put(vector: Any, number: int, of: int, ranks: int, rounds: int, values: Any) -> None:
    """`comb of vector = values`."""
    for q in range(rounds):
        at = q * ranks * of + number
        for p in range(ranks):
            vector[at + p * of] = values[p * rounds + q]


@compiled
def subtract(vector: Any, number: int, of: int, ranks: int, rounds: int, values: Any, rate: float) -> None:
    """`comb of vector -= rate * values`, where the product is first rounded to the vector's type, as in torch."""
    for q in range(rounds):
        at = q * ranks * of + number
        for p in range(ranks):
            vector[at + p * of] -= rate * values[p * rounds + q]
