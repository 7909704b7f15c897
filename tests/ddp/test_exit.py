"""How processes end: without a crash at the interpreter's end, and soon after an error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

JOB = Path(__file__).parent / "exit_job.py"
HANGING_SECONDS = 200.0


class Ended(NamedTuple):
    code: int | None  # None: it had to be killed
    told: str
    words: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_job(size: int, ending: str) -> list[Ended]:
    """Real interpreters, started and ended as a launcher does."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **common, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB), ending],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + HANGING_SECONDS
    return [ended(process, deadline) for process in ranks]


def ended(process: subprocess.Popen[str], deadline: float) -> Ended:
    try:
        told, words = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended(None, *process.communicate())
    return Ended(process.returncode, told, words)


def check_good_end(size: int, ending: str, run: int) -> None:
    for rank, end in enumerate(run_job(size, ending)):
        assert end.code == 0, f"run {run}, {ending}: rank {rank} ended with {end.code}: {end.words[-2000:]}"
        assert end.told == f"rank {rank} is done\n"
        assert "terminate called" not in end.words


@pytest.mark.parametrize("ending", ["destroy", "nothing"])
def test_jobs_end_well(ending: str) -> None:
    for run in range(2 if ending == "destroy" else 1):
        check_good_end(2, ending, run)


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_fifty_jobs_of_four_ranks_end_well() -> None:
    for run in range(50):
        check_good_end(4, ("destroy", "close", "nothing")[run % 3], run)


def test_ranks_that_lost_a_peer_end_with_its_error() -> None:
    *survivors, victim = run_job(3, "lost")
    assert victim.code == -9
    for rank, end in enumerate(survivors):
        assert end.code == 1, f"rank {rank} ended with {end.code}: {end.words[-2000:]}"
        assert f"PeerLostError: rank {rank}: step 4, all parameters: their comparison failed" in end.words
        assert "lost rank 2 " in end.words
        assert "in phase comparison of replicas" in end.words


@pytest.mark.parametrize("ending", ["lost-gradients", "lost-updates"])
def test_a_peer_that_is_lost_in_a_dense_step_is_named(ending: str) -> None:
    *survivors, victim = run_job(3, ending)
    assert victim.code == -9
    for rank, end in enumerate(survivors):
        assert end.code == 1, f"rank {rank} ended with {end.code}: {end.words[-2000:]}"
        assert f"PeerLostError: rank {rank}: step " in end.words
        assert "all parameters: their sum failed: " in end.words
        assert "lost rank 2 " in end.words
