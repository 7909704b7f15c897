"""What a rank is told when a peer raises, leaves, dies, stays silent or talks nonsense; nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsieve import InputError, MessageError, PeerLostError, TorchComm
from gradsieve.comm import Comm
from gradsieve.comm.mpi import MpiComm
from gradsieve.comm.transport import CountedTransport, FramedTransport, Link
from gradsieve.comm.transport.link import LARGEST_MESSAGE_BYTES
from gradsieve.testing import run_ranks
from support.comm_contract import FITS_FIRST_PART, run_gloo, send_lengths_to_all

PATIENT_SECONDS = 60.0
VICTIM = 2
NONSENSE_LENGTHS = (-1, LARGEST_MESSAGE_BYTES - 1, LARGEST_MESSAGE_BYTES, 2**63 - 1)


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_rank_that_raises_ends_the_run_with_its_exception(culprit: int) -> None:
    def work(comm: Comm) -> None:
        comm.all_reduce(torch.ones(3))
        if comm.rank == culprit:
            raise ZeroDivisionError("no such batch")
        comm.all_reduce(torch.ones(3))

    with pytest.raises(ZeroDivisionError, match=f"^rank {culprit}: no such batch$"):
        run_ranks(4, work)


def test_the_rank_is_named_even_where_the_message_mentions_others() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("rank 10 of the table")

    with pytest.raises(ZeroDivisionError, match=r"^rank 1: rank 10 of the table$"):
        run_ranks(2, work)


def test_an_exception_without_text_gets_the_rank_as_a_note() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError, match="on rank 1"):
        run_ranks(2, work)


def call_once(comm: Comm) -> None:
    list(comm.all_to_all([torch.ones(3)] * comm.size))


def receive_from_rank_1(comm: Comm) -> None:
    comm.send_recv(torch.ones(3), None, 1)


@pytest.mark.parametrize("wait", [call_once, receive_from_rank_1])
def test_a_rank_that_returns_early_is_named(wait: Callable[[Comm], None]) -> None:
    def work(comm: Comm) -> None:
        if comm.rank != 1:
            wait(comm)

    with pytest.raises(PeerLostError, match=r"^rank [02]: rank 1 ended while its message was awaited$"):
        run_ranks(3, work)


def test_a_silent_thread_runs_into_the_timeout() -> None:
    told: list[str] = []

    def work(comm: Comm) -> None:
        try:
            if comm.rank == 0:
                receive_from_rank_1(comm)
        except PeerLostError as error:
            told.append(str(error))
        while not told:
            time.sleep(0.01)

    run_ranks(2, work, timeout_seconds=0.2)
    assert told == ["rank 0: nothing from rank 1 within 0.2 s"]


@pytest.mark.parametrize("size", [0, -1])
def test_a_run_of_no_ranks_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"size must be at least 1, got {size}"):
        run_ranks(size, call_once)


def test_torch_comm_needs_torch_distributed() -> None:
    with pytest.raises(InputError, match=r"not initialized: start with torchrun .* or pass comm="):
        TorchComm()


def test_mpi_comm_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InputError, match=r'needs mpi4py .*: pip install "gradsieve\[mpi\]"'):
        MpiComm()


def test_mpi_starts_only_when_a_comm_is_made() -> None:
    program = "import sys, gradsieve.comm.mpi; sys.exit('mpi4py' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two was told in each of the cases below; starting processes costs more than they do."""
    outcomes = run_gloo(_ill_treated, 2, tmp_path_factory.mktemp("gloo"))
    assert outcomes[0] is not None, "rank 0 died"
    return outcomes[0]


@pytest.mark.parametrize("transport", ["framed", "counted"])
@pytest.mark.parametrize("length", NONSENSE_LENGTHS)
def test_a_nonsense_length_is_an_error(told: dict[str, Any], transport: str, length: int) -> None:
    sentence = told[f"{transport} {length}"]
    assert sentence.startswith(f"MessageError: rank 0: rank 1 announces {length} bytes (")
    assert ("(allowed are 0 to" in sentence) == (not 0 <= length < LARGEST_MESSAGE_BYTES)


def test_bytes_that_are_no_values_are_an_error(told: dict[str, Any]) -> None:
    sentence = "MessageError: rank 0: rank 1 sent 5 bytes, which is not a whole number of torch.float32 values"
    assert told["five bytes"] == sentence


def test_all_reduce_of_a_strided_view_is_refused(told: dict[str, Any]) -> None:
    assert told["strided"].startswith("InputError: all_reduce needs a contiguous tensor")


def test_a_timeout_must_be_positive(told: dict[str, Any]) -> None:
    assert told["no timeout"] == "InputError: timeout_seconds must be positive, got 0"


def test_a_silent_peer_runs_into_the_timeout(told: dict[str, Any]) -> None:
    assert told["all_to_all"].startswith("PeerLostError: rank 0: lost rank 1 or had no answer within 1 s")
    assert "1000ms" in told["all_to_all"]


def test_a_peer_stays_lost(told: dict[str, Any]) -> None:
    assert told["after"].startswith("PeerLostError: rank 0: lost rank 1 ")


def test_a_silent_peer_in_a_collective_runs_into_the_timeout(told: dict[str, Any]) -> None:
    assert told["all_reduce"].startswith("PeerLostError: rank 0: lost a peer or had no answer within 1 s")


def test_a_killed_peer_is_known_to_all_at_once(tmp_path: Path) -> None:
    outcomes = run_gloo(_killed_peer, 4, tmp_path)
    assert outcomes.pop(VICTIM) is None
    for rank, sentence in zip((0, 1, 3), outcomes, strict=True):
        assert re.match(f"PeerLostError: rank {rank}: lost rank {VICTIM} ", sentence)
        assert "imed out" not in sentence


def _said(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except (InputError, MessageError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _ill_treated(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 treats rank 0 badly, and both stay in step until it falls silent."""
    link = Link(dist.group.WORLD, PATIENT_SECONDS)
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS)
    counted = TorchComm(transport=CountedTransport(link, torch.device("cpu")))
    told = {}
    for name, ours in (("framed", comm), ("counted", counted)):
        for length in NONSENSE_LENGTHS:
            if rank == 0:
                told[f"{name} {length}"] = _said(receive_from_rank_1, ours)
            else:
                link.send(torch.tensor([length]).view(torch.uint8), 0).wait()
            send_lengths_to_all(ours, lambda source, to: FITS_FIRST_PART + source, torch.uint8)
    if rank == 0:
        told["five bytes"] = _said(receive_from_rank_1, comm)
    else:
        comm.send_recv(torch.ones(5, dtype=torch.uint8), 0, None)
    told["strided"] = _said(comm.all_reduce, torch.ones(6, 2)[:, 0])
    told["no timeout"] = _said(lambda: TorchComm(timeout_seconds=0))
    send_lengths_to_all(comm, lambda source, to: 3, torch.float32)
    if rank == 0:
        impatient = TorchComm(timeout_seconds=1)
        told["all_reduce"] = _said(impatient.all_reduce, torch.ones(3))
        told["all_to_all"] = _said(call_once, impatient)
        told["after"] = _said(receive_from_rank_1, impatient)
    _meet(rank, (0, 1) if rank else (0,), folder)
    return told


def _killed_peer(rank: int, folder: Path) -> str:
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS)
    call_once(comm)
    survivors = [r for r in range(comm.size) if r != VICTIM]
    if rank == VICTIM:
        # Once it has heard from all others, all their messages are under way: they wait for the victim only.
        transport = FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS))
        for source in survivors:
            transport.receive(source).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    sentence = _said(lambda: list(comm.all_to_all([torch.ones(600_000)] * comm.size)))
    # A survivor that ended now would be lost itself: did the others hear of the victim, or of the survivor?
    _meet(rank, survivors, folder)
    return sentence


def _meet(rank: int, ranks: Sequence[int], folder: Path) -> None:
    """Wait, without the network, until all of `ranks` are here."""
    (folder / f"here-{rank}").touch()
    while not all((folder / f"here-{other}").exists() for other in ranks):
        time.sleep(0.02)
