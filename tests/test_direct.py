"""Connections between ranks in place of Gloo's: what is refused, what is noticed, when they are not used at all."""

from __future__ import annotations

import logging
import math
import socket
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_contract import (
    SomeLink,
    assert_all_were_told,
    run_gloo,
    seen_after_exchanges,
    told_of_kill,
    told_of_loss,
)
from gradsieve import MessageError, PeerLostError, TorchComm
from gradsieve.comm.transport import FramedTransport, Link, Rounds, address, meeting
from gradsieve.comm.transport.address import TcpPlace, own_address
from gradsieve.comm.transport.connection import FRAME, Connection
from gradsieve.comm.transport.direct import PACE_BYTES, PACE_SAMPLES, DirectTransport, Pace
from gradsieve.comm.transport.meeting import HELLO, SECRET_BYTES, Listener
from gradsieve.comm.transport.shared_memory import SharedMemoryTransport

PATIENT_SECONDS = 60.0
MORE_THAN_SYSTEMS_HOLD = 12_000_000  # bytes: Linux keeps up to 6 MB for a receiver and 4 MB of a sender


def pair() -> tuple[Connection, socket.socket]:
    """This rank's end of a connection, and the other end to write anything to."""
    ours, theirs = socket.socketpair()
    return Connection(cast(Link, SomeLink()), 1, ours), theirs


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_come_whole_and_in_order_however_they_are_cut() -> None:
    wire, there = pair()
    stream = FRAME.pack(0, 3) + b"abc" + FRAME.pack(1, 0) + FRAME.pack(2, 2) + b"de"
    first, second, third = (wire.expect() for _ in range(3))
    for end in range(1, len(stream)):
        there.sendall(stream[end - 1 : end])
        wire.pull()
    assert wire.take(first) is not None
    assert wire.take(second) is not None
    assert wire.take(third) is None
    there.sendall(stream[-1:])
    last = wire.take(third)
    assert last is not None
    assert last.numpy().tobytes() == b"de"


def test_what_the_system_does_not_take_leaves_later() -> None:
    wire, there = pair()
    large = torch.arange(1 << 22, dtype=torch.int32).view(torch.uint8)
    wire.send(large)
    wire.send(message(7))
    assert not wire.all_sent
    arrived = b""
    while not wire.all_sent or len(arrived) < large.numel() + 1 + 2 * FRAME.size:
        arrived += there.recv(1 << 20)
        wire.push()
    assert arrived == FRAME.pack(0, large.numel()) + large.numpy().tobytes() + FRAME.pack(1, 1) + b"\7"


def test_what_was_left_of_another_exchange_is_refused() -> None:
    """Taken for this one's it would be a wrong result, without a word."""
    wire, there = pair()
    wire.expect()  # an exchange that was abandoned
    there.sendall(FRAME.pack(0, 1) + b"a" + FRAME.pack(1, 1) + b"b")
    with pytest.raises(MessageError, match="rank 0: malformed message from rank 1: it is number 0, not 1"):
        wire.take(wire.expect())


@pytest.mark.parametrize("length", [-1, 1 << 50, 1 << 62])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    wire, there = pair()
    there.sendall(FRAME.pack(0, length))
    with pytest.raises(MessageError, match=f"rank 0: rank 1 announces {length} bytes"):
        wire.take(wire.expect())


def test_who_has_said_everything_may_leave() -> None:
    """A rank that is done ends, while others still wait for third ones: what it sent counts, and it is not lost."""
    wire, there = pair()
    there.sendall(FRAME.pack(0, 1) + b"a")
    there.close()
    wire.pull()
    assert wire.interest == 0, "an ended connection would be reported again and again"
    assert wire.take(wire.expect()) is not None
    with pytest.raises(PeerLostError, match="lost rank 1 .its connection ended"):
        wire.take(wire.expect())


def test_sending_to_who_has_ended_is_a_lost_peer() -> None:
    wire, there = pair()
    there.close()
    with pytest.raises(PeerLostError, match="lost rank 1"):
        wire.send(message(1))


def test_the_pace_is_what_most_of_the_latest_bytes_took() -> None:
    pace = Pace()
    assert pace.seconds_per_byte == math.inf
    pace.add(1.0, PACE_BYTES // 2)
    assert pace.seconds_per_byte == math.inf, "too few bytes to tell"
    pace.add(1.0, PACE_BYTES // 2)
    assert pace.seconds_per_byte == 2.0 / PACE_BYTES
    for seconds in (100.0, 3.0, 3.0):
        pace.add(seconds, PACE_BYTES)
    assert pace.seconds_per_byte == 3.0 / PACE_BYTES, "a hiccup does not count"
    for _ in range(PACE_SAMPLES):
        pace.add(0.0, PACE_BYTES)
    assert pace.seconds_per_byte == 0.0, "a faster link is noticed"


def test_a_message_is_under_way_from_its_first_byte_to_its_last() -> None:
    wire, there = pair()
    seen = []
    for part in (FRAME.pack(0, 2)[:3], FRAME.pack(0, 2)[3:], b"a", b"b"):
        seen.append(wire.under_way)
        there.sendall(part)
        wire.pull()
    assert [*seen, wire.under_way] == [False, True, True, True, False]


def connected(comm: TorchComm) -> bool:
    return cast(DirectTransport, comm._transport).connected


def direct_comm(timeout_seconds: float = PATIENT_SECONDS, place: TcpPlace | None = None) -> TorchComm:
    around = FramedTransport(Link(dist.group.WORLD, timeout_seconds))
    transport = DirectTransport(around, connected_after=0, place=place)
    return TorchComm(timeout_seconds=timeout_seconds, transport=transport)


def test_messages_longer_than_systems_hold_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert run_gloo(_long_messages, 4, tmp_path) == [True] * 4


class Distant(SharedMemoryTransport):
    """Ranks 0 and 1 are on one machine, 2 and 3 on another."""

    def _acquaint(self, rounds: Rounds) -> None:
        super()._acquaint(rounds)
        rank = self._around.link.rank
        self._near = {other: near for other, near in self._near.items() if other // 2 == rank // 2}
        self.in_memory = False


def _long_messages(rank: int, folder: Path) -> bool:
    own = direct_comm()
    around = DirectTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)), connected_after=4)
    mixed = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=Distant(around, acquainted_after=0))
    for comm in (own, mixed):
        for salt in range(3):
            # Who sends last to whom reads first, and some come late.
            time.sleep(0.1 * ((rank + salt) % 2))
            buffer = torch.full((MORE_THAN_SYSTEMS_HOLD // 4,), 10 * salt + rank, dtype=torch.int32)
            for source, arrived in comm.exchange([buffer] * comm.size):
                assert arrived.numel() == buffer.numel()
                assert bool((arrived == 10 * salt + source).all())
        to, source = (rank + 1) % comm.size, (rank - 1) % comm.size
        around_ring = comm.send_recv(torch.full((MORE_THAN_SYSTEMS_HOLD // 4,), rank, dtype=torch.int32), to, source)
        assert around_ring is not None
        assert bool((around_ring == source).all())
    assert around.connected
    dist.barrier()
    dist.destroy_process_group()
    return connected(own)


class Hidden(TcpPlace):
    """An address that nobody can call."""

    def listen(self, num_callers: int) -> Listener:
        listener = super().listen(num_callers)
        port = listener.address.split()[0]
        listener.socket.close()
        unbound = socket.socket()
        unbound.bind(("127.0.0.1", 0))
        return Listener(unbound, port + b" 127.0.0.1")


class Reluctant(TcpPlace):
    """The first call fails: only one pair does not speak, and the third rank has all its connections."""

    def __init__(self) -> None:
        self.failures = iter([OSError("no route")])

    def call(self, address: bytes) -> socket.socket:
        for failure in self.failures:
            raise failure
        return super().call(address)


class Mute(TcpPlace):
    """A machine that forbids it."""

    def listen(self, num_callers: int) -> Listener:
        raise OSError("not in this sandbox")


@pytest.mark.parametrize("kind", ["Hidden", "Mute", "Reluctant"])
def test_if_one_pair_does_not_come_to_speak_all_stay_with_gloo(kind: str, tmp_path: Path) -> None:
    """And the ranks it is about say so, since it costs time and nothing else would tell."""
    (tmp_path / "kind").write_text(kind)
    found = run_gloo(_one_is_apart, 3, tmp_path)
    assert [connected for connected, _ in found] == [False] * 3
    apart = {"Hidden": [[2], [2], [0, 1]], "Mute": [[2], [2], [0, 1]]}
    for rank, ((_, said), missing) in enumerate(zip(found, apart.get(kind, [[1], [0], []]), strict=True)):
        if kind == "Reluctant":  # which of its two calls comes first is chance
            assert len(said) <= 1
            continue
        (line,) = said
        named = ", ".join(map(str, missing))
        assert line.startswith(
            f"rank {rank}: no connection with rank {named} within 3 s, so messages go on through Gloo"
        )
    assert sum(len(said) for _, said in found) == (2 if kind == "Reluctant" else 3)


def _one_is_apart(rank: int, folder: Path) -> tuple[bool, list[str]]:
    who, kind = {"Hidden": (2, Hidden), "Mute": (2, Mute), "Reluctant": (0, Reluctant)}[(folder / "kind").read_text()]
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradsieve").addHandler(handler)
    comm = direct_comm(place=kind() if rank == who else None)
    for _ in range(3):
        arrived = dict(comm.exchange([torch.full((5,), rank)] * comm.size))
        assert [arrived[source].tolist() for source in range(3)] == [[source] * 5 for source in range(3)]
    dist.barrier()
    dist.destroy_process_group()
    return connected(comm), said


def test_the_pace_counts_an_exchange_as_a_whole(tmp_path: Path) -> None:
    """While one waits for the first long message the others come too: taken one by one, most seemed to need no time."""
    assert run_gloo(_slow_exchange, 4, tmp_path) == [1] * 4


def _slow_exchange(rank: int, folder: Path) -> int:
    comm = direct_comm()
    list(comm.exchange([torch.ones(2 * PACE_BYTES // 4)] * comm.size))
    samples = len(cast(DirectTransport, comm._transport)._pace._samples)
    dist.barrier()
    dist.destroy_process_group()
    return samples


def test_a_killed_rank_is_known_to_all_at_once(tmp_path: Path) -> None:
    assert_all_were_told(run_gloo(_killed, 4, tmp_path), 2, PATIENT_SECONDS / 2)


def _killed(rank: int, folder: Path) -> tuple[str, float] | None:
    comm = direct_comm()
    list(comm.exchange([torch.ones(10)] * comm.size))
    assert connected(comm)
    return told_of_kill(comm, 2, folder)


def test_silence_is_a_lost_peer_within_the_timeout(tmp_path: Path) -> None:
    sentence, seconds = run_gloo(_silent, 2, tmp_path)[0]
    assert "rank 0: lost rank 1 or had no answer within 1 s" in sentence
    assert 0.9 < seconds < PATIENT_SECONDS / 2


def _silent(rank: int, folder: Path) -> tuple[str, float] | None:
    comm = direct_comm(timeout_seconds=1.0)
    list(comm.exchange([torch.ones(10)] * comm.size))
    dist.barrier()
    if rank == 1:
        while not (folder / "told").exists():
            time.sleep(0.02)
        return None
    outcome = told_of_loss(comm)
    (folder / "told").touch()
    return outcome


def test_strangers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one does not know the secret, one is a rank that was not expected."""
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo")
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.1)
    place, secret = TcpPlace(), b"s" * SECRET_BYTES
    listener = place.listen(4)
    said = [b"", HELLO.pack(b"?" * SECRET_BYTES, 1), HELLO.pack(secret, 3), HELLO.pack(secret, 1)]
    callers = [place.call(listener.address) for _ in said]
    for caller, hello in zip(callers, said, strict=True):
        caller.sendall(hello)
    answered = meeting._answered(listener.socket, secret, {1})
    assert list(answered) == [1]
    assert answered[1].getpeername() == callers[3].getsockname()
    for each in (listener.socket, answered[1], *callers):
        each.close()


def test_nobody_waits_long_for_who_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo")
    monkeypatch.setattr(meeting, "CALL_SECONDS", 0.1)
    listener = TcpPlace().listen(1)
    assert meeting._answered(listener.socket, b"", {1}) == {}
    listener.socket.close()


@pytest.mark.parametrize(
    "address", [b"", b"here", b"80", b"99999999 127.0.0.1", b"\xff\xfe 127.0.0.1", b"1 no such host"]
)
def test_an_address_that_is_none_is_nobody_to_call(address: bytes) -> None:
    offers = {1: b"s" * SECRET_BYTES + address}
    assert meeting._called(TcpPlace(), offers, rank=0) == {}


def test_the_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo,eth9")
    assert own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv(address.GLOO_INTERFACE, "nosuch0")
    with pytest.raises(OSError, match="No such device"):
        own_address()
    monkeypatch.delenv(address.GLOO_INTERFACE)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == (socket.AF_INET, "127.0.0.1")


def test_a_comm_that_lives_for_a_step_does_not_call_others(tmp_path: Path) -> None:
    assert run_gloo(_short_lived, 2, tmp_path) == [[False] * 12 + [True] * 2] * 2


def _short_lived(rank: int, folder: Path) -> list[Any]:
    transport = DirectTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)))
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    return seen_after_exchanges(comm, 14, lambda: transport.connected)
