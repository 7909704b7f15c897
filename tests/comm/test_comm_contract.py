"""Every comm keeps one contract: threads, real processes over Gloo by all transports, and MPI."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradsieve.comm import Comm, CountingComm, LocalComm, Room, TorchComm, Traffic
from gradsieve.comm.mpi import MpiComm
from gradsieve.comm.transport import CountedTransport, FramedTransport, Link, Rounds, Transport
from gradsieve.comm.transport.direct import DirectTransport
from gradsieve.comm.transport.shared_memory import SharedMemoryTransport
from gradsieve.errors import InputError
from gradsieve.testing import run_ranks
from support.comm_contract import check_contract, run_gloo

TIMEOUT_SECONDS = 60.0
SIZES = (1, 2, 3, 4)
TRANSPORTS = ("framed", "counted", "memory", "some memory", "direct")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_local(size: int) -> None:
    run_ranks(size, check_contract, timeout_seconds=TIMEOUT_SECONDS)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_counting(size: int) -> None:
    def check(comm: Comm) -> Traffic:
        counting = CountingComm(comm)
        check_contract(counting)
        return counting.traffic

    traffic = run_ranks(size, check, timeout_seconds=TIMEOUT_SECONDS)
    assert sum(t.messages_sent for t in traffic) == sum(t.messages_received for t in traffic)
    assert sum(t.bytes_sent for t in traffic) == sum(t.bytes_received for t in traffic)


@pytest.fixture(scope="module")
def gloo_done(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[str | int]]]:
    """What each process of one Gloo world went through: starting processes costs more than the contract."""
    done = run_gloo(_check_gloo, max(SIZES), tmp_path_factory.mktemp("gloo"))
    assert None not in done, "a process died"
    return done


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gloo(gloo_done: list[list[list[str | int]]], transport: str, size: int) -> None:
    assert sum([transport, size] in done for done in gloo_done) == size


def _check_gloo(rank: int, folder: Path) -> list[tuple[str, int]]:
    world = dist.get_world_size()
    done = []
    for size in SIZES:
        # The last ranks, not the first: a rank in the group must never be taken for one in the world.
        members = list(range(world - size, world))
        group = dist.new_group(members, timeout=timedelta(seconds=TIMEOUT_SECONDS))
        for transport in TRANSPORTS if rank in members else ():
            carrier = _transport(group, transport)
            check_contract(TorchComm(group, timeout_seconds=TIMEOUT_SECONDS, transport=carrier))
            if isinstance(carrier, SharedMemoryTransport):
                assert carrier.in_memory == (transport == "memory" and size > 1)
                assert not carrier.in_memory or carrier.seconds_per_byte == 0
            if isinstance(carrier, DirectTransport):
                assert carrier.connected == (size > 1)
            done.append((transport, size))
    dist.barrier()
    dist.destroy_process_group()
    return done


def _transport(group: dist.ProcessGroup, name: str) -> Transport:
    link = Link(group, TIMEOUT_SECONDS)
    if name == "framed":
        return FramedTransport(link)
    if name == "counted":
        return CountedTransport(link, torch.device("cpu"))
    direct = DirectTransport(FramedTransport(link), connect_after=0 if name == "direct" else 4)
    if name == "direct":
        return direct
    return (SharedMemoryTransport if name == "memory" else Distant)(direct, connect_after=0)


class Distant(SharedMemoryTransport):
    """The first rank and the last are on different machines."""

    def _connect(self, rounds: Rounds) -> None:
        super()._connect(rounds)
        last = len(rounds)
        if self._inner.link.rank in (0, last):
            self._local.pop(last - self._inner.link.rank, None)
        self.in_memory = False


def test_exchange_is_the_former_name_of_all_to_all() -> None:
    comm, buffer = LocalComm(0, Room(1)), torch.ones(3)
    with pytest.deprecated_call(match="now called Comm.all_to_all"):
        assert list(comm.exchange([buffer])) == list(comm.all_to_all([buffer])) == [(0, buffer)]


@pytest.fixture(scope="module")
def mpi_done(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each process of one MPI job went through."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpiexec is not None, "mpi4py is installed without mpiexec"
    folder = tmp_path_factory.mktemp("mpi")
    command = [mpiexec, "-n", str(max(SIZES)), sys.executable, "-m", "mpi4py", __file__, str(folder)]
    with subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            output, _ = job.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    assert job.returncode == 0, output
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("size", SIZES)
def test_mpi(mpi_done: list[str], size: int) -> None:
    assert sum(name.startswith(f"{size}-") for name in mpi_done) == size


def _check_mpi(folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_contract(MpiComm())
    (folder / f"{world.size}-{world.rank}").touch()
    for size in SIZES[:-1]:
        group = world.Split(0 if world.rank >= world.size - size else MPI.UNDEFINED)
        if group == MPI.COMM_NULL:
            with pytest.raises(InputError, match="this process is a member of, got COMM_NULL"):
                MpiComm(group)
        else:
            # The user's own messages, still under way, must not be taken for the comm's.
            users = group.Isend(torch.zeros(3).numpy(), (group.rank + 1) % size)
            check_contract(MpiComm(group))
            group.Recv(torch.zeros(3).numpy(), (group.rank - 1) % size)
            users.Wait()
            (folder / f"{size}-{world.rank}").touch()


if __name__ == "__main__":
    _check_mpi(Path(sys.argv[1]))
