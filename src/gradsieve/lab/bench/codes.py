"""Size and speed of the message codes on one thread. Rows of `bench wire`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsieve.lab.bench.report import Row
from gradsieve.vector import SparseVector
from gradsieve.wire import Codec
from gradsieve.wire.indices import INDEX_CODES
from gradsieve.wire.message import Expected, unpack

ENTRY_BYTES = 8  # int32 and float32, as the papers count


def _uniform(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(numel, generator=generator) < density


def _clustered(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    """All selected entries lie in runs of 1000 entries, of which a quarter are selected."""
    runs = torch.rand(-(-numel // 1000), generator=generator) < 4 * density
    inside = runs.repeat_interleave(1000)[:numel]
    return inside & (torch.rand(numel, generator=generator) < 0.25)


PATTERNS: dict[str, Callable[[int, float, torch.Generator], torch.Tensor]] = {
    "uniform": _uniform,
    "clustered": _clustered,
}


def index_row(numel: int, density: float, pattern: str) -> Row:
    """Size of the indices relative to n H(k/n), the entropy of a uniformly random set of that size."""
    selected = PATTERNS[pattern](numel, density, torch.Generator().manual_seed(0))
    indices = selected.nonzero().flatten().int().numpy()
    code = INDEX_CODES["auto"](indices, 0)
    share = indices.size / numel
    entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return {
        "kind": "indices",
        "indices": type(code).__name__.lower(),
        "pattern": pattern,
        **_conditions(numel, density),
        "bytes_per_entry": 8 * code.num_words / indices.size,
        "of_entropy": 64 * code.num_words / entropy_bits,
    }


def speed_row(numel: int, density: float, values: str, indices: str) -> Row:
    """Encoding and decoding one message with all selected entries of one rank."""
    generator = torch.Generator().manual_seed(0)
    positions = _uniform(numel, density, generator).nonzero().flatten()
    drawn = torch.randn(positions.numel(), generator=generator)
    vector = SparseVector(positions, drawn + drawn.sign(), numel)  # all well above zero, as selected entries are
    expected = Expected(0, numel, 1, torch.float32, torch.device("cpu"))
    codec = Codec(values, indices)
    packed = codec.pack(vector, expected, 0)
    encode = _median_seconds(lambda: codec.pack(vector, expected, 0))
    decode = _median_seconds(lambda: unpack(packed.message, expected, 0, numel, 1))
    gigabytes = ENTRY_BYTES * vector.nnz / 1e9
    return {
        "kind": "speed",
        "values": values,
        "indices": indices,
        **_conditions(numel, density),
        "bytes_per_entry": packed.message.numel() / vector.nnz,
        "encode_gigabytes_per_second": gigabytes / encode,
        "decode_gigabytes_per_second": gigabytes / decode,
    }


def _conditions(numel: int, density: float) -> dict[str, Any]:
    return {"numel": numel, "density": density, "ranks": 1, "threads": 1}


def _median_seconds(work: Callable[[], object]) -> float:
    """Median of 15 calls, after one that compiles."""
    work()
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))
