"""Messages through shared memory: what is refused, what is noticed, what is freed."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from gradsieve import MessageError, PeerLostError, TorchComm
from gradsieve.comm.transport import FramedTransport, Link
from gradsieve.comm.transport.shared_buffer import Location, SharedBuffer
from gradsieve.comm.transport.shared_memory import (
    LOCATED,
    LocalAddresses,
    LocalPeer,
    SharedMemoryTransport,
)
from support.comm_contract import SomeLink, assert_all_were_told, observed_after_calls, run_gloo, told_of_kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such memory")

PATIENT_SECONDS = 60.0
MESSAGES = [torch.arange(100, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)]


def pair() -> tuple[LocalPeer, LocalPeer, socket.socket]:
    """Two connected ranks, and the second one's socket to write nonsense to."""
    ours, theirs = socket.socketpair()
    link = cast(Link, SomeLink())
    return LocalPeer(link, 1, ours), LocalPeer(link, 0, theirs), theirs


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_come_as_they_were_and_stay() -> None:
    here, there, _ = pair()
    buffer = SharedBuffer(0)
    for location in buffer.write(MESSAGES):
        there.send(0, location, buffer)
    first, second = here.receive(0), here.receive(0)
    buffer.write([torch.zeros(100, dtype=torch.uint8)])
    assert torch.equal(first, MESSAGES[0])
    assert torch.equal(second, MESSAGES[1])


def test_a_message_for_several_ranks_is_written_once() -> None:
    assert len({location.offset for location in SharedBuffer(0).write([MESSAGES[0]] * 3)}) == 1
    assert len({location.offset for location in SharedBuffer(0).write(MESSAGES)}) == 2
    assert len({location.length for location in SharedBuffer(0).write([MESSAGES[0], MESSAGES[0][:7]])}) == 2


def test_buffers_that_grow_are_handed_over_and_the_old_ones_freed() -> None:
    here, there, _ = pair()
    buffers = [SharedBuffer(0), SharedBuffer(1)]
    before = None
    for number in range(24):
        message = torch.full((1 << (number // 2),), number, dtype=torch.uint8)
        (location,) = buffers[number % 2].write([message])
        there.send(number, location, buffers[number % 2])
        assert torch.equal(here.receive(number), message)
        if number == 1:
            before = num_descriptors()
    assert num_descriptors() == before


@pytest.mark.parametrize(
    "location",
    [
        Location(2, 0, 1 << 40),
        Location(2, -8, 8),
        Location(2, 1 << 62, 1 << 62),
        Location(2, 0, -1),
        Location(4, 0, 8),
        Location(3, 0, 8),
    ],
)
def test_a_location_that_is_not_in_the_buffer_is_refused(location: Location) -> None:
    here, there, connection = pair()
    buffer = SharedBuffer(0)
    (good,) = buffer.write(MESSAGES[:1])
    there.send(0, good, buffer)
    here.receive(0)
    connection.sendall(LOCATED.pack(0, *location))
    with pytest.raises(MessageError, match="rank 0: malformed message from rank 1: cannot be read"):
        here.receive(0)


def test_a_message_of_another_call_is_refused() -> None:
    """Used for this call it would be a wrong result, without an error."""
    here, there, _ = pair()
    buffer = SharedBuffer(0)
    (location,) = buffer.write(MESSAGES[:1])
    there.send(7, location, buffer)
    with pytest.raises(MessageError, match="it belongs to call 7, this is call 8"):
        here.receive(8)


def test_memory_that_could_shrink_under_a_reader_is_refused() -> None:
    here, _, connection = pair()
    descriptor = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    before = num_descriptors()
    socket.send_fds(connection, [LOCATED.pack(0, 2, 0, 8)], [descriptor])
    with pytest.raises(MessageError, match="the memory may shrink"):
        here.receive(0)
    assert num_descriptors() == before
    os.close(descriptor)


def test_a_location_without_a_buffer_is_refused() -> None:
    here, _, connection = pair()
    connection.sendall(LOCATED.pack(0, 2, 0, 8))
    with pytest.raises(MessageError, match="malformed message from rank 1"):
        here.receive(0)


def test_a_connection_that_ends_is_a_lost_peer() -> None:
    here, there, connection = pair()
    connection.sendall(b"half a frame")
    connection.close()
    with pytest.raises(PeerLostError, match="lost rank 1 .its connection ended"):
        here.receive(0)
    del there


def test_silence_is_a_lost_peer() -> None:
    here, there, _ = pair()
    with pytest.raises(PeerLostError, match="lost rank 1 .timed out"):
        here.receive(0)
    del there


def test_where_memory_cannot_be_shared_no_rank_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    LocalAddresses().listen(3).socket.close()

    def forbidden(*arguments: Any) -> int:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with pytest.raises(OSError, match="not in this sandbox"):
        LocalAddresses().listen(3)


def test_a_killed_local_peer_is_known_to_all_at_once(tmp_path: Path) -> None:
    assert_all_were_told(run_gloo(_killed, 4, tmp_path), 2, PATIENT_SECONDS / 2)


def _killed(rank: int, folder: Path) -> tuple[str, float] | None:
    transport = SharedMemoryTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)), connect_after=0)
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    list(comm.all_to_all([torch.ones(10)] * comm.size))
    assert transport.in_memory
    return told_of_kill(comm, 2, folder)


def test_a_comm_that_is_used_for_one_step_does_not_connect(tmp_path: Path) -> None:
    assert run_gloo(_short_lived, 2, tmp_path) == [[False] * 8 + [True] * 2] * 2


def _short_lived(rank: int, folder: Path) -> list[Any]:
    transport = SharedMemoryTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)))
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    return observed_after_calls(comm, 10, lambda: transport.in_memory)
