"""Connections between ranks instead of Gloo's: what is refused, what is noticed, when they are not used at all."""

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

from gradsieve import MessageError, PeerLostError, TorchComm
from gradsieve.comm.transport import FramedTransport, Link, Rounds, address, rendezvous
from gradsieve.comm.transport.address import TcpAddresses, own_address
from gradsieve.comm.transport.connection import FRAME, Connection
from gradsieve.comm.transport.direct import PACE_BYTES, PACE_SAMPLES, DirectTransport, Pace
from gradsieve.comm.transport.rendezvous import HELLO, SECRET_BYTES, Listener
from gradsieve.comm.transport.shared_memory import SharedMemoryTransport
from support.comm_contract import (
    SomeLink,
    assert_all_were_told,
    observed_after_calls,
    run_gloo,
    told_of_kill,
    told_of_loss,
)

PATIENT_SECONDS = 60.0
MORE_THAN_SYSTEMS_HOLD = 12_000_000  # bytes: Linux keeps up to 6 MB for a receiver and 4 MB of a sender


def pair() -> tuple[Connection, socket.socket]:
    """This rank's end of a connection, and the other end to write anything to."""
    ours, theirs = socket.socketpair()
    return Connection(cast(Link, SomeLink()), 1, ours), theirs


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_come_whole_and_in_order_however_they_are_cut() -> None:
    connection, there = pair()
    stream = FRAME.pack(0, 3) + b"abc" + FRAME.pack(1, 0) + FRAME.pack(2, 2) + b"de"
    first, second, third = (connection.expect() for _ in range(3))
    for end in range(1, len(stream)):
        there.sendall(stream[end - 1 : end])
        connection.pull()
    assert connection.take(first) is not None
    assert connection.take(second) is not None
    assert connection.take(third) is None
    there.sendall(stream[-1:])
    last = connection.take(third)
    assert last is not None
    assert last.numpy().tobytes() == b"de"


def test_what_the_system_does_not_take_leaves_later() -> None:
    connection, there = pair()
    large = torch.arange(1 << 22, dtype=torch.int32).view(torch.uint8)
    connection.send(large)
    connection.send(message(7))
    assert not connection.all_sent
    arrived = b""
    while not connection.all_sent or len(arrived) < large.numel() + 1 + 2 * FRAME.size:
        arrived += there.recv(1 << 20)
        connection.push()
    assert arrived == FRAME.pack(0, large.numel()) + large.numpy().tobytes() + FRAME.pack(1, 1) + b"\7"


def test_a_message_of_another_call_is_refused() -> None:
    """Used for this call it would be a wrong result, without an error."""
    connection, there = pair()
    connection.expect()  # a call that was abandoned
    there.sendall(FRAME.pack(0, 1) + b"a" + FRAME.pack(1, 1) + b"b")
    with pytest.raises(MessageError, match="rank 0: malformed message from rank 1: it is number 0, not 1"):
        connection.take(connection.expect())


@pytest.mark.parametrize("length", [-1, 1 << 50, 1 << 62])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    connection, there = pair()
    there.sendall(FRAME.pack(0, length))
    with pytest.raises(MessageError, match=f"rank 0: rank 1 announces {length} bytes"):
        connection.take(connection.expect())


def test_a_rank_that_has_sent_everything_may_end() -> None:
    """While others still wait for third ranks: its messages count, and it is not lost."""
    connection, there = pair()
    there.sendall(FRAME.pack(0, 1) + b"a")
    there.close()
    connection.pull()
    assert connection.interest == 0, "an ended connection would be reported again and again"
    assert connection.take(connection.expect()) is not None
    with pytest.raises(PeerLostError, match="lost rank 1 .its connection ended"):
        connection.take(connection.expect())


def test_sending_to_a_rank_that_has_ended_is_a_lost_peer() -> None:
    connection, there = pair()
    there.close()
    with pytest.raises(PeerLostError, match="lost rank 1"):
        connection.send(message(1))


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
    connection, there = pair()
    observed = []
    for part in (FRAME.pack(0, 2)[:3], FRAME.pack(0, 2)[3:], b"a", b"b"):
        observed.append(connection.under_way)
        there.sendall(part)
        connection.pull()
    assert [*observed, connection.under_way] == [False, True, True, True, False]


def connected(comm: TorchComm) -> bool:
    return cast(DirectTransport, comm._transport).connected


def direct_comm(timeout_seconds: float = PATIENT_SECONDS, kind: TcpAddresses | None = None) -> TorchComm:
    inner = FramedTransport(Link(dist.group.WORLD, timeout_seconds))
    transport = DirectTransport(inner, connect_after=0, kind=kind)
    return TorchComm(timeout_seconds=timeout_seconds, transport=transport)


def test_messages_longer_than_systems_hold_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert run_gloo(_long_messages, 4, tmp_path) == [True] * 4


class Distant(SharedMemoryTransport):
    """Ranks 0 and 1 are on one machine, 2 and 3 on another."""

    def _connect(self, rounds: Rounds) -> None:
        super()._connect(rounds)
        rank = self._inner.link.rank
        self._local = {other: peer for other, peer in self._local.items() if other // 2 == rank // 2}
        self.in_memory = False


def _long_messages(rank: int, folder: Path) -> bool:
    own = direct_comm()
    inner = DirectTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)), connect_after=4)
    mixed = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=Distant(inner, connect_after=0))
    for comm in (own, mixed):
        for salt in range(3):
            # Who sends last to whom reads first, and some come late.
            time.sleep(0.1 * ((rank + salt) % 2))
            buffer = torch.full((MORE_THAN_SYSTEMS_HOLD // 4,), 10 * salt + rank, dtype=torch.int32)
            for source, arrived in comm.all_to_all([buffer] * comm.size):
                assert arrived.numel() == buffer.numel()
                assert bool((arrived == 10 * salt + source).all())
        to, source = (rank + 1) % comm.size, (rank - 1) % comm.size
        around_ring = comm.send_recv(torch.full((MORE_THAN_SYSTEMS_HOLD // 4,), rank, dtype=torch.int32), to, source)
        assert around_ring is not None
        assert bool((around_ring == source).all())
    assert inner.connected
    dist.barrier()
    dist.destroy_process_group()
    return connected(own)


class Hidden(TcpAddresses):
    """An address that no rank can connect to."""

    def listen(self, num_peers: int) -> Listener:
        listener = super().listen(num_peers)
        port = listener.address.split()[0]
        listener.socket.close()
        unbound = socket.socket()
        unbound.bind(("127.0.0.1", 0))
        return Listener(unbound, port + b" 127.0.0.1")


class Reluctant(TcpAddresses):
    """The first connection fails: only one pair is not connected, and the third rank has all its connections."""

    def __init__(self) -> None:
        self.failures = iter([OSError("no route")])

    def connect(self, address: bytes) -> socket.socket:
        for failure in self.failures:
            raise failure
        return super().connect(address)


class Mute(TcpAddresses):
    """A machine that forbids listening."""

    def listen(self, num_peers: int) -> Listener:
        raise OSError("not in this sandbox")


@pytest.mark.parametrize("kind", ["Hidden", "Mute", "Reluctant"])
def test_if_one_pair_cannot_connect_all_keep_to_gloo(kind: str, tmp_path: Path) -> None:
    """And its two ranks say so, because it costs time and nothing else would tell."""
    (tmp_path / "kind").write_text(kind)
    found = run_gloo(_one_is_apart, 3, tmp_path)
    assert [connected for connected, _ in found] == [False] * 3
    apart = {"Hidden": [[2], [2], [0, 1]], "Mute": [[2], [2], [0, 1]]}
    for rank, ((_, said), missing) in enumerate(zip(found, apart.get(kind, [[1], [0], []]), strict=True)):
        if kind == "Reluctant":  # which of its two connections is tried first is random
            assert len(said) <= 1
            continue
        (line,) = said
        named = ", ".join(map(str, missing))
        assert line.startswith(
            f"rank {rank}: no connection with rank {named} within 3 s, so messages still go through Gloo"
        )
    assert sum(len(said) for _, said in found) == (2 if kind == "Reluctant" else 3)


def _one_is_apart(rank: int, folder: Path) -> tuple[bool, list[str]]:
    which, kind = {"Hidden": (2, Hidden), "Mute": (2, Mute), "Reluctant": (0, Reluctant)}[(folder / "kind").read_text()]
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradsieve").addHandler(handler)
    comm = direct_comm(kind=kind() if rank == which else None)
    for _ in range(3):
        arrived = dict(comm.all_to_all([torch.full((5,), rank)] * comm.size))
        assert [arrived[source].tolist() for source in range(3)] == [[source] * 5 for source in range(3)]
    dist.barrier()
    dist.destroy_process_group()
    return connected(comm), said


def test_the_pace_counts_a_call_as_a_whole(tmp_path: Path) -> None:
    """While a rank waits for the first long message the others arrive: one by one, most would seem to take no time."""
    assert run_gloo(_slow_call, 4, tmp_path) == [1] * 4


def _slow_call(rank: int, folder: Path) -> int:
    comm = direct_comm()
    list(comm.all_to_all([torch.ones(2 * PACE_BYTES // 4)] * comm.size))
    samples = len(cast(DirectTransport, comm._transport)._pace._samples)
    dist.barrier()
    dist.destroy_process_group()
    return samples


def test_a_killed_rank_is_known_to_all_at_once(tmp_path: Path) -> None:
    assert_all_were_told(run_gloo(_killed, 4, tmp_path), 2, PATIENT_SECONDS / 2)


def _killed(rank: int, folder: Path) -> tuple[str, float] | None:
    comm = direct_comm()
    list(comm.all_to_all([torch.ones(10)] * comm.size))
    assert connected(comm)
    return told_of_kill(comm, 2, folder)


def test_silence_is_a_lost_peer_within_the_timeout(tmp_path: Path) -> None:
    sentence, seconds = run_gloo(_silent, 2, tmp_path)[0]
    assert "rank 0: lost rank 1 or had no answer within 1 s" in sentence
    assert 0.9 < seconds < PATIENT_SECONDS / 2


def _silent(rank: int, folder: Path) -> tuple[str, float] | None:
    comm = direct_comm(timeout_seconds=1.0)
    list(comm.all_to_all([torch.ones(10)] * comm.size))
    dist.barrier()
    if rank == 1:
        while not (folder / "told").exists():
            time.sleep(0.02)
        return None
    outcome = told_of_loss(comm)
    (folder / "told").touch()
    return outcome


def test_connections_of_strangers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sends nothing, one does not know the secret, one is a rank that was not expected."""
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo")
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.1)
    kind, secret = TcpAddresses(), b"s" * SECRET_BYTES
    listener = kind.listen(4)
    said = [b"", HELLO.pack(b"?" * SECRET_BYTES, 1), HELLO.pack(secret, 3), HELLO.pack(secret, 1)]
    connections = [kind.connect(listener.address) for _ in said]
    for connection, hello in zip(connections, said, strict=True):
        connection.sendall(hello)
    accepted = rendezvous._accepted(listener.socket, secret, {1})
    assert list(accepted) == [1]
    assert accepted[1].getpeername() == connections[3].getsockname()
    for each in (listener.socket, accepted[1], *connections):
        each.close()


def test_no_rank_waits_long_for_one_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo")
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 0.1)
    listener = TcpAddresses().listen(1)
    assert rendezvous._accepted(listener.socket, b"", {1}) == {}
    listener.socket.close()


@pytest.mark.parametrize(
    "address", [b"", b"here", b"80", b"99999999 127.0.0.1", b"\xff\xfe 127.0.0.1", b"1 no such host"]
)
def test_an_invalid_address_gives_no_connection(address: bytes) -> None:
    offers = {1: b"s" * SECRET_BYTES + address}
    assert rendezvous._connected(TcpAddresses(), offers, rank=0) == {}


def test_the_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.GLOO_INTERFACE, "lo,eth9")
    assert own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv(address.GLOO_INTERFACE, "nosuch0")
    with pytest.raises(OSError, match="No such device"):
        own_address()
    monkeypatch.delenv(address.GLOO_INTERFACE)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == (socket.AF_INET, "127.0.0.1")


def test_a_comm_that_is_used_for_one_step_does_not_connect(tmp_path: Path) -> None:
    assert run_gloo(_short_lived, 2, tmp_path) == [[False] * 12 + [True] * 2] * 2


def _short_lived(rank: int, folder: Path) -> list[Any]:
    transport = DirectTransport(FramedTransport(Link(dist.group.WORLD, PATIENT_SECONDS)))
    comm = TorchComm(timeout_seconds=PATIENT_SECONDS, transport=transport)
    return observed_after_calls(comm, 14, lambda: transport.connected)
