"""Messages through memory that two ranks share: what is refused, what is noticed, what is given back."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from comm_contract import SomeLink, assert_all_were_told, run_gloo, seen_after_exchanges, told_of_kill
from gradsieve import MessageError, PeerLostError, TorchComm
from gradsieve.comm.transport import FramedTransport, Link
from gradsieve.comm.transport.shared_memory import NOTE, Board, MemoryPlace, Neighbour, Place, SharedMemoryTransport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such memory")

PATIENT_SECONDS = 60.0
MESSAGES = [torch.arange(100, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)]


def pair() -> tuple[Neighbour, Neighbour, socket.socket]:
    """Two ranks that know each other, and the second one's end to write nonsense to."""
    ours, theirs = socket.socketpair()
    link = cast(Link, SomeLink())
    return Neighbour(link, 1, ours), Neighbour(link, 0, theirs), theirs


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_come_as_they_were_and_stay() -> None:
    here, there, _ = pair()
    board = Board(0)
    for place in board.show(MESSAGES):
        there.tell(0, place, board)
    first, second = here.read(0), here.read(0)
    board.show([torch.zeros(100, dtype=torch.uint8)])
    assert torch.equal(first, MESSAGES[0])
    assert torch.equal(second, MESSAGES[1])


def test_a_message_for_several_ranks_lies_on_the_board_once() -> None:
    assert len({place.offset for place in Board(0).show([MESSAGES[0]] * 3)}) == 1
    assert len({place.offset for place in Board(0).show(MESSAGES)}) == 2
    assert len({place.length for place in Board(0).show([MESSAGES[0], MESSAGES[0][:7]])}) == 2


def test_boards_that_grow_are_handed_over_and_the_old_ones_given_back() -> None:
    here, there, _ = pair()
    boards = [Board(0), Board(1)]
    before = None
    for number in range(24):
        message = torch.full((1 << (number // 2),), number, dtype=torch.uint8)
        (place,) = boards[number % 2].show([message])
        there.tell(number, place, boards[number % 2])
        assert torch.equal(here.read(number), message)
        if number == 1:
            before = num_descriptors()
    assert num_descriptors() == before


@pytest.mark.parametrize(
    "place",
    [
        Place(2, 0, 1 << 40),
        Place(2, -8, 8),
        Place(2, 1 << 62, 1 << 62),
        Place(2, 0, -1),
        Place(4, 0, 8),
        Place(3, 0, 8),
    ],
)
def test_a_place_that_is_not_on_the_board_is_refused(place: Place) -> None:
    here, there, connection = pair()
    board = Board(0)
    (good,) = board.show(MESSAGES[:1])
    there.tell(0, good, board)
    here.read(0)
    connection.sendall(NOTE.pack(0, *place))
    with pytest.raises(MessageError, match="rank 0: malformed message from rank 1: nothing to be read there"):
        here.read(0)


def test_what_was_left_of_another_exchange_is_refused() -> None:
    """Taken for this one's it would be a wrong result, without a word."""
    here, there, _ = pair()
    board = Board(0)
    (place,) = board.show(MESSAGES[:1])
    there.tell(7, place, board)
    with pytest.raises(MessageError, match="it belongs to exchange 7, this is 8"):
        here.read(8)


def test_memory_that_could_shrink_under_a_reader_is_refused() -> None:
    here, _, connection = pair()
    descriptor = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    before = num_descriptors()
    socket.send_fds(connection, [NOTE.pack(0, 2, 0, 8)], [descriptor])
    with pytest.raises(MessageError, match="it may shrink"):
        here.read(0)
    assert num_descriptors() == before
    os.close(descriptor)


def test_no_board_at_all_is_refused() -> None:
    here, _, connection = pair()
    connection.sendall(NOTE.pack(0, 2, 0, 8))
    with pytest.raises(MessageError, match="malformed message from rank 1"):
        here.read(0)


def test_a_connection_that_ends_is_a_lost_peer() -> None:
    here, there, connection = pair()
    connection.sendall(b"half a note")
    connection.close()
    with pytest.raises(PeerLostError, match="lost rank 1 .its connection ended"):
        here.read(0)
    del there


def test_silence_is_a_lost_peer() -> None:
    here, there, _ = pair()
    with pytest.raises(PeerLostError, match="lost rank 1 .timed out"):
        here.read(0)
    del there


def test_where_memory_cannot_be_shared_nobody_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryPlace().listen(3).socket.close()

    def forbidden(*arguments: Any) -> int:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with pytest.raises(OSError, match="not in this sandbox"):
        MemoryPlace().listen(3)


def test_a_killed_neighbour_is_known_to_all_at_once(tmp_path: Path) -> None:
    assert_all_were_told(run_gloo(_killed, 4, tmp_path), 2, PATIENT_SECONDS / 2)


def _killed(rank: int, folder: Path) -> tuple[str, float] | None:
    transport = SharedMemoryTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)), acquainted_after=0)
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    list(comm.exchange([torch.ones(10)] * comm.size))
    assert transport.in_memory
    return told_of_kill(comm, 2, folder)


def test_a_comm_that_lives_for_one_step_does_not_call_its_neighbours(tmp_path: Path) -> None:
    assert run_gloo(_short_lived, 2, tmp_path) == [[False] * 8 + [True] * 2] * 2


def _short_lived(rank: int, folder: Path) -> list[Any]:
    transport = SharedMemoryTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)))
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    return seen_after_exchanges(comm, 10, lambda: transport.in_memory)
