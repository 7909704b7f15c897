"""Who was lost? A rank that fails knows whom it waited for, which may be a rank that had failed itself before.

Gloo's ranks are all connected to each other, and the end of a process closes all its connections: so a rank whose
collective failed asks each connection whether it still stands. And who finds a loss first writes it to the store that
the ranks met at: whoever fails later, since the first one has ended, reads the cause there. Nothing here may wait: the
store itself may have been the lost rank's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

PROBE_TAG = 0x10577  # no message of ours has it: a probe is never received
STORE_SECONDS = 2.0  # for a store that may be gone
KEY = "gradsieve-lost"


def lost_ranks(group: dist.ProcessGroup, peer: int | None, error: BaseException) -> list[int]:
    """The ranks of the group that were lost first, as far as this rank can find out; empty if it cannot."""
    suspects = ended_peers(group) if peer is None else [peer]
    silent = "imed out" in str(error)  # whoever did not answer may have waited for somebody else
    first = _first_told(group, [] if silent else suspects)
    if first is None:  # nobody can tell any more who was first: all who are gone may have been
        return sorted({*suspects, *ended_peers(group)})
    return first or suspects


def ended_peers(group: dist.ProcessGroup) -> list[int]:
    """Those whose connection is closed. Only Gloo can be asked."""
    if dist.get_backend(group) != "gloo":
        return []
    return [peer for peer in range(group.size()) if peer != group.rank() and not _stands(group, peer)]


def _stands(group: dist.ProcessGroup, peer: int) -> bool:
    try:
        dist.isend(torch.zeros(1, dtype=torch.uint8), group=group, group_dst=peer, tag=PROBE_TAG)
    except RuntimeError:
        return False
    return True


def _first_told(group: dist.ProcessGroup, suspects: Sequence[int]) -> list[int] | None:
    """Tell the others, unless somebody has before; what was told first comes back, None if the store is gone."""
    told: list[list[int]] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # a store that is gone can tell nothing
            store = distributed_c10d._get_default_store()
            key = f"{KEY}/{group.group_name}"
            if suspects:
                first = store.compare_set(key, "", ",".join(map(str, suspects)))
            else:
                first = store.get(key) if store.check([key]) else b""
            told.append([int(rank) for rank in first.decode().split(",") if rank])

    asking = threading.Thread(target=ask, name="gradsieve-loss", daemon=True)
    asking.start()
    asking.join(STORE_SECONDS)
    return told[0] if told else None
