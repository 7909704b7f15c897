"""The world that torchrun, Slurm or MPI has started this process in, according to environment variables."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from gradsieve.errors import InputError

PORT = 29500
SLURM_PORTS = (20_000, 20_000)  # the first, and how many: two jobs on one machine must not use the same port
was_joined = False  # whether this process has been a rank of a launcher's world
NOT_A_STEP = 4_294_967_290  # Slurm step ids from here on are batch scripts and the like: one process, no world


class Launcher(NamedTuple):
    """A launcher and its environment variables."""

    name: str
    rank: str
    size: str
    local_rank: str


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class World:
    """This process's rank, and the address at which the ranks connect."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def found_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher has created, or None if there is no launcher."""
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.size in environment:
            if launcher.name == "Slurm" and not _is_step(environment):
                continue
            rank, size, local = (
                _number(environment, name) for name in (launcher.rank, launcher.size, launcher.local_rank)
            )
            if not 0 <= rank < size:
                raise InputError(f"{launcher.name} says that this is rank {rank} of {size}: check {launcher.size}")
            return World(launcher.name, rank, size, local, *_address(launcher.name, rank, size, environment))
    return None


@contextlib.contextmanager
def joined(
    world: World, device: str, timeout_seconds: float, before: Callable[[Any, int, int], None] | None = None
) -> Iterator[None]:
    """Inside, the default process group of that world is initialized.

    `before` is called first, with torch's store, this rank and the number of ranks. If it raises, there is no group.
    """
    global was_joined
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    timeout = timedelta(seconds=timeout_seconds)
    address = f"{world.address}:{world.port}"
    try:
        store, _, _ = next(iter(rendezvous(f"tcp://{address}", world.rank, world.size, timeout=timeout)))
    except RuntimeError as error:
        raise InputError(
            f"rank {world.rank}: no connection with rank 0 at {address} within {timeout_seconds:g} s: check that "
            f"rank 0 runs there, and MASTER_ADDR and MASTER_PORT ({type(error).__name__})"
        ) from error
    store.set_timeout(timeout)
    if before is not None:
        before(PrefixStore("before", store), world.rank, world.size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=PrefixStore("default_pg", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    was_joined = True
    yield
    # Without a barrier right before, Gloo's threads may still run while the interpreter shuts down.
    dist.barrier()
    dist.destroy_process_group()


def _address(launcher: str, rank: int, size: int, environment: Mapping[str, str]) -> tuple[str, int]:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", PORT)
    if size == 1:
        return "127.0.0.1", _free_port()
    if launcher == "Slurm":
        first, count = SLURM_PORTS
        return _first_host(environment), first + _number(environment, "SLURM_JOB_ID", 0) % count
    if launcher != "torchrun" and (address := _address_by_mpi(rank)) is not None:
        return address
    raise InputError(
        f"rank {rank}: {launcher} gives no address of rank 0: set MASTER_ADDR (the name of rank 0's machine) and "
        "MASTER_PORT for all ranks, or install mpi4py for the same MPI"
    )


def _address_by_mpi(rank: int) -> tuple[str, int] | None:
    """Rank 0 broadcasts its host name and a free port. None without mpi4py."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    import socket

    own = (socket.gethostname(), _free_port()) if rank == 0 else None
    host, port = MPI.COMM_WORLD.bcast(own)
    machines = set(MPI.COMM_WORLD.allgather(socket.gethostname()))
    return ("127.0.0.1" if len(machines) == 1 else host), port


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script has a rank too, but is a single process."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < NOT_A_STEP


def _first_host(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=20, check=True
        )
        return listed.stdout.split()[0]
    # Without Slurm's own tool, the first name of a list such as `node[03-07,9],other` is expanded here.
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise InputError("Slurm does not say which nodes this job has: set MASTER_ADDR and MASTER_PORT")
    return "".join(part or "" for part in match.groups())


def _free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} must be a whole number, got {text!r}") from None
