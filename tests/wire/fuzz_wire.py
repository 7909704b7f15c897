"""Coverage-guided fuzzing of what arrives from the network: `python tests/wire/fuzz_wire.py -runs=200000`.

Inputs are messages of every code, changed by atheris; each must give a well-formed vector or a typed error. The
compiled loops are run with bounds checks, so that a read or write outside of an array is a crash here.
"""

from __future__ import annotations

import os
import sys

os.environ["NUMBA_BOUNDSCHECK"] = "1"

import atheris
import torch

import gradsieve.kernels.fields
import gradsieve.kernels.gaps
import gradsieve.kernels.positions
import gradsieve.kernels.signs
import gradsieve.kernels.twobits  # noqa: F401  (compiled code cannot be instrumented: it is imported before)

with atheris.instrument_imports(include=["gradsieve.wire"]):
    from gradsieve.errors import MessageError, MismatchError
    from gradsieve.vector import SparseVector
    from gradsieve.wire import Codec
    from gradsieve.wire.indices import INDEX_CODES
    from gradsieve.wire.message import Expected, unpack
    from gradsieve.wire.values import VALUE_CODES

NUMEL = 200
EXPECTED = Expected(rank=0, numel=NUMEL, k=5, dtype=torch.float32, device=torch.device("cpu"))


def seeds() -> list[bytes]:
    """A message in every combination of codes, and one with many entries."""
    few = SparseVector(torch.tensor([1, 4, 90, 160, 199]), torch.tensor([1.0, -2.0, 3.0, 0.0, 7.0]), NUMEL)
    many = SparseVector(torch.arange(0, NUMEL, 2), torch.linspace(-3, 3, NUMEL // 2), NUMEL)
    return [
        bytes(Codec(values, indices).pack(vector, EXPECTED, 0).message.tolist())
        for vector in (few, many)
        for values in VALUE_CODES
        for indices in INDEX_CODES
    ]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Usually a seed message with atheris' changes, so that headers are mostly right."""
    known = SEEDS[seed % len(SEEDS)]
    start = known if seed % 3 == 0 or not data else data
    changed = bytearray(atheris.Mutate(start, len(start) if seed % 5 else max_size))
    if seed % 7:
        changed[: min(len(changed), 40)] = known[: min(len(changed), 40)]  # past the checks of the header
    return bytes(changed)


def one_input(data: bytes) -> None:
    """What fuzzing calls."""
    message = torch.tensor(list(data), dtype=torch.uint8)
    try:
        arrived = unpack(message, EXPECTED, 0, NUMEL, source=1).vector
    except (MessageError, MismatchError):
        return
    SparseVector(arrived.indices, arrived.values, NUMEL)


SEEDS = seeds()

if __name__ == "__main__":
    for seed in SEEDS:
        one_input(seed)
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()
