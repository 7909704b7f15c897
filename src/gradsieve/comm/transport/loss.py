"""Which rank was lost? A rank that fails knows which rank it waited for, but that rank may have failed for another one.

1. Gloo connects all ranks with each other, and the end of a process closes its connections. A rank whose collective
   failed therefore probes each connection.
2. The first rank that finds a loss writes it to the store of the process group. Ranks that fail later, because the
   first one has ended, read the cause there.
Nothing here may wait long: the store itself may have been in the lost rank's process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

PROBE_TAG = 0x10577  # no message has this tag, so a probe is never received
STORE_SECONDS = 2.0  # to wait for a store that may be gone
KEY = "gradsieve-lost"


def lost_ranks(group: dist.ProcessGroup, peer: int | None, error: BaseException) -> list[int]:
    """The ranks of the group that were lost first, as far as this rank can find out; empty if it cannot."""
    suspects = ended_peers(group) if peer is None else [peer]
    timed_out = "imed out" in str(error)  # a rank that did not answer in time may itself have waited for another one
    first = _first_reported(group, [] if timed_out else suspects)
    if first is None:  # the store is gone: any of the ranks that have ended may have been the first
        return sorted({*suspects, *ended_peers(group)})
    return first or suspects


def ended_peers(group: dist.ProcessGroup) -> list[int]:
    """The ranks whose connection is closed. Only Gloo can tell."""
    if dist.get_backend(group) != "gloo":
        return []
    return [peer for peer in range(group.size()) if peer != group.rank() and not _is_connected(group, peer)]


def _is_connected(group: dist.ProcessGroup, peer: int) -> bool:
    try:
        dist.isend(torch.zeros(1, dtype=torch.uint8), group=group, group_dst=peer, tag=PROBE_TAG)
    except RuntimeError:
        return False
    return True


def _first_reported(group: dist.ProcessGroup, suspects: Sequence[int]) -> list[int] | None:
    """Report the suspects, if no rank has reported before; returns the first report, or None if the store is gone."""
    reports: list[list[int]] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the store may be gone
            store = distributed_c10d._get_default_store()
            key = f"{KEY}/{group.group_name}"
            if suspects:
                first = store.compare_set(key, "", ",".join(map(str, suspects)))
            else:
                first = store.get(key) if store.check([key]) else b""
            reports.append([int(rank) for rank in first.decode().split(",") if rank])

    asking = threading.Thread(target=ask, name="gradsieve-loss", daemon=True)
    asking.start()
    asking.join(STORE_SECONDS)
    return reports[0] if reports else None
