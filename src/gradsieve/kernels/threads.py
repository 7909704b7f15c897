"""Passes over long vectors, cut among up to `torch.get_num_threads()` plain threads. The loops release the GIL.

Not Numba's own `parallel=True`: its OpenMP pool kills forked data-loader workers, and its `workqueue` pool forbids
concurrent callers. Starting a thread takes about 50 microseconds, next to milliseconds of work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from gradsieve.kernels.lanes import STORE_ALIGNMENT_BYTES

CHUNK_ENTRIES = 1 << 23  # a thread's least share: in shorter passes torch's OpenMP workers still spin on its core


def chunk_bounds(numel: int) -> list[int]:
    """Equal chunks that begin at multiples of a cache line, one per thread. An empty vector is one chunk."""
    threads = max(1, min(torch.get_num_threads(), numel // CHUNK_ENTRIES))
    step = -(-numel // threads)
    step += -step % STORE_ALIGNMENT_BYTES
    return [min(part * step, numel) for part in range(threads)] + [numel]


def in_threads(work: Callable[[int, int, int], None], numel: int) -> None:
    """Call `work(chunk, start, stop)` for every chunk, the first one on this thread."""
    bounds = chunk_bounds(numel)
    others = [
        threading.Thread(target=work, args=(chunk, bounds[chunk], bounds[chunk + 1]))
        for chunk in range(1, len(bounds) - 1)
    ]
    for thread in others:
        thread.start()
    work(0, bounds[0], bounds[1])
    for thread in others:
        thread.join()
