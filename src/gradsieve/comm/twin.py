"""A second process group of the same ranks, for another thread: two threads on one group would deadlock.

`torch.distributed.new_group` cannot make it. If only the members call it (`use_local_synchronization=True`), it names
the group after the number of groups that each process knows. Processes that know different numbers then wait for each
other forever under different names. And the name of a destroyed group is used again, with its old addresses. So the
members agree on a name that was never used.
"""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradsieve.errors import InputError, PeerLostError


def twin_of(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """Another group of the same ranks. All of them call this together."""
    ranks = dist.get_process_group_ranks(group)
    name = _agreed_name(group)
    try:
        own, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            dist.get_rank(group),
            ranks,
            dist.Backend(dist.get_backend(group)),
            distributed_c10d._get_default_store(),
            group_name=name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise _absent(group, error) from error
    assert isinstance(own, dist.ProcessGroup), "this process is a member"
    distributed_c10d._world.pg_group_ranks[own] = {rank: number for number, rank in enumerate(ranks)}
    return own


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long calls on a group wait for a peer, in seconds."""
    return float(group._get_backend(_device(group)).options._timeout.total_seconds())


def checked_timeout(group: dist.ProcessGroup, timeout_seconds: float | None) -> float:
    """The timeout that was asked for, or the group's own; raises if it is not positive."""
    if timeout_seconds is None:
        return timeout_of(group)
    if timeout_seconds <= 0:
        raise InputError(f"timeout_seconds must be positive, got {timeout_seconds}")
    return timeout_seconds


def _agreed_name(group: dist.ProcessGroup) -> str:
    token = torch.tensor([secrets.randbits(62)], device=_device(group))
    try:
        dist.broadcast(token, group=group, group_src=0)
    except RuntimeError as error:
        raise _absent(group, error) from error
    return f"gradsieve-{int(token):x}"


def _absent(group: dist.ProcessGroup, error: RuntimeError) -> PeerLostError:
    return PeerLostError(
        f"rank {dist.get_rank(group)}: not all ranks took part in making a process group: a peer failed before, or "
        f"does not call this at all ({error})"
    )


def _device(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
