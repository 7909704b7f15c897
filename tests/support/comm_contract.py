"""What every comm must do, as plain functions of one rank's comm; and real processes to run them in.

All ranks of a group call `check_contract` together. A failing check raises on the rank that saw it.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from gradsieve.comm import FRAME_BYTES, Comm
from gradsieve.comm.protocol import rotation
from gradsieve.comm.transport import Link
from gradsieve.comm.transport.framed import FIRST_PART_BYTES
from gradsieve.errors import InputError, PeerLostError

FITS_FIRST_PART = FIRST_PART_BYTES - FRAME_BYTES
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32)
PATTERN = torch.arange(FIRST_PART_BYTES + 200, dtype=torch.int32).remainder(120).to(torch.uint8)
SUM_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16)
GRACE_SECONDS = 5.0


def payload(source: int, to: int, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """What `source` sends `to`: different for every pair and salt, exact in every dtype."""
    begin = (7 * source + to + 41 * salt) % 120
    return PATTERN[begin : begin + numel].to(dtype, copy=True)


def addend(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (values * 1000).to(dtype)


def assert_same(arrived: Tensor | None, expected: Tensor) -> None:
    assert arrived is not None
    assert arrived.dtype == expected.dtype
    assert arrived.shape == expected.shape
    assert torch.equal(arrived, expected)


def send_lengths_to_all(comm: Comm, length: Callable[[int, int], int], dtype: torch.dtype, salt: int = 0) -> None:
    """One `all_to_all` of `length(source, to)` entries for each pair, checked in order and content."""
    me = comm.rank
    arrived = list(comm.all_to_all([payload(me, to, length(me, to), dtype, salt) for to in range(comm.size)]))
    assert [source for source, _ in arrived] == [(me - step) % comm.size for step in range(comm.size)]
    for source, buffer in arrived:
        assert_same(buffer, payload(source, me, length(source, me), dtype, salt))


def send_lengths(comm: Comm, length: Callable[[int], int], dtype: torch.dtype, salt: int = 0) -> None:
    """Around a ring: `length(rank)` entries to the next, from the one before."""
    to, source = ring(comm)
    arrived = comm.send_recv(payload(comm.rank, to, length(comm.rank), dtype, salt), to, source)
    assert_same(arrived, payload(source, comm.rank, length(source), dtype, salt))


def ring(comm: Comm) -> tuple[int, int]:
    return rotation(comm.rank, comm.size)[0]


def all_reduce_sums_in_place(comm: Comm) -> None:
    for dtype in SUM_DTYPES:
        for numel in (0, 1, comm.size - 1, 1001):
            addends = [addend(rank, numel, dtype) for rank in range(comm.size)]
            tensor = addends[comm.rank].clone()
            assert comm.all_reduce(tensor) is tensor
            exact = torch.stack(addends).to(torch.float64)
            eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            error = (tensor.to(torch.float64) - exact.sum(dim=0)).abs()
            assert bool((error <= comm.size * eps * exact.abs().sum(dim=0)).all())


def all_reduce_gives_the_same_bits_everywhere(comm: Comm) -> None:
    for dtype in SUM_DTYPES:
        tensor = comm.all_reduce(addend(comm.rank, 4099, dtype))
        bits = tensor.view(torch.uint8).clone()
        for other in comm.all_gather_v(bits):
            assert_same(other, bits)


def all_reduce_changes_only_its_slice(comm: Comm) -> None:
    whole = torch.ones(100)
    comm.all_reduce(whole[10:20])
    assert whole[10:20].tolist() == [comm.size] * 10
    assert whole.sum() == 90 + 10 * comm.size


def all_reduce_of_a_strided_view_is_right_or_refused(comm: Comm) -> None:
    matrix = torch.ones(6, 2)
    with suppress(InputError):
        comm.all_reduce(matrix[:, 0])
        assert matrix[:, 0].tolist() == [comm.size] * 6
    assert matrix[:, 1].tolist() == [1] * 6


def all_to_all_gives_ones_own_buffer_without_a_copy(comm: Comm) -> None:
    buffers = [payload(comm.rank, to, 3) for to in range(comm.size)]
    source, own = next(arrivals := comm.all_to_all(buffers))
    assert source == comm.rank
    assert own is buffers[comm.rank]
    assert len(list(arrivals)) == comm.size - 1


def all_to_all_takes_any_lengths(comm: Comm) -> None:
    for salt, dtype in enumerate(DTYPES):
        send_lengths_to_all(comm, lambda source, to: 5, dtype, salt)
        send_lengths_to_all(comm, lambda source, to: 13 * source + 5 * to, dtype, salt)
        send_lengths_to_all(comm, lambda source, to: 100 * ((source + to) % 2), dtype, salt)
        send_lengths_to_all(comm, lambda source, to: 0, dtype, salt)
        send_lengths_to_all(comm, lambda source, to: 1000 * (source == comm.size - 1), dtype, salt)


def all_to_all_takes_large_messages(comm: Comm) -> None:
    send_lengths_to_all(comm, lambda source, to: FITS_FIRST_PART + (source + to) % 3 - 1, torch.uint8)
    send_lengths_to_all(comm, lambda source, to: FIRST_PART_BYTES + (source + to) % 3 - 1, torch.uint8)
    send_lengths_to_all(comm, lambda source, to: FITS_FIRST_PART // 4 + (source + to) % 2, torch.float32)
    send_lengths_to_all(comm, lambda source, to: 600_000 * (source == 0), torch.float32)


def all_to_all_v_is_in_rank_order(comm: Comm) -> None:
    me = comm.rank
    arrived = comm.all_to_all_v([payload(me, to, 3 * me + to, torch.int32) for to in range(comm.size)])
    assert len(arrived) == comm.size
    for source, buffer in enumerate(arrived):
        assert_same(buffer, payload(source, me, 3 * source + me, torch.int32))


def all_gather_v_is_in_rank_order(comm: Comm) -> None:
    for dtype in DTYPES:
        arrived = comm.all_gather_v(payload(comm.rank, 0, 4 * comm.rank, dtype))
        assert len(arrived) == comm.size
        for source, buffer in enumerate(arrived):
            assert_same(buffer, payload(source, 0, 4 * source, dtype))


def send_recv_of_neither_half_is_nothing(comm: Comm) -> None:
    assert comm.send_recv(torch.ones(3), None, None) is None


def send_recv_goes_around_a_ring(comm: Comm) -> None:
    if comm.size == 1:
        return
    for dtype in DTYPES:
        send_lengths(comm, lambda rank: 10, dtype)
        send_lengths(comm, lambda rank: 17 * rank, dtype)
        send_lengths(comm, lambda rank: 0, dtype)
    for numel in (FITS_FIRST_PART, FIRST_PART_BYTES):
        send_lengths(comm, lambda rank, numel=numel: numel + rank % 3 - 1, torch.uint8)
    send_lengths(comm, lambda rank: 600_000 * (rank == 0), torch.float32)


def send_recv_swaps_pairs(comm: Comm) -> None:
    partner = comm.rank ^ 1
    peer = partner if partner < comm.size else None
    arrived = comm.send_recv(payload(comm.rank, partner, 5 + comm.rank), peer, peer)
    if peer is None:
        assert arrived is None
    else:
        assert_same(arrived, payload(partner, comm.rank, 5 + partner))


def send_recv_does_one_half(comm: Comm) -> None:
    """Along a chain: the first only sends, the last only receives."""
    before = comm.rank - 1 if comm.rank > 0 else None
    after = comm.rank + 1 if comm.rank < comm.size - 1 else None
    for numel in (0, 9, FIRST_PART_BYTES):
        buffer = payload(comm.rank, 0, numel)
        if before is not None:
            assert_same(comm.send_recv(buffer, None, before), payload(before, 0, numel))
        assert comm.send_recv(buffer, after, None) is None


def senders_may_overwrite_their_buffers(comm: Comm) -> None:
    for numel in (10, FIRST_PART_BYTES):
        buffers = [payload(comm.rank, to, numel) for to in range(comm.size)]
        arrived = comm.all_to_all_v(buffers)
        for buffer in buffers:
            buffer.fill_(-1)
        send_lengths_to_all(comm, lambda source, to, numel=numel: numel, torch.float32, salt=1)
        for source in set(range(comm.size)) - {comm.rank}:
            assert_same(arrived[source], payload(source, comm.rank, numel))


def sent_buffers_may_be_overwritten_after_send_recv(comm: Comm) -> None:
    if comm.size == 1:
        return
    to, source = ring(comm)
    for numel in (10, FIRST_PART_BYTES):
        buffer = payload(comm.rank, to, numel)
        arrived = comm.send_recv(buffer, to, source)
        buffer.fill_(-1)
        send_lengths(comm, lambda rank, numel=numel: numel, torch.float32, salt=1)
        assert_same(arrived, payload(source, comm.rank, numel))


def many_calls_stay_in_step(comm: Comm) -> None:
    for salt in range(12):
        if salt % 4 == comm.rank:
            time.sleep(0.003)
        send_lengths_to_all(comm, lambda source, to, salt=salt: (7 * source + to + salt) % 5, torch.int32, salt)
        if comm.size > 1:
            send_lengths(comm, lambda rank, salt=salt: (rank + salt) % 3, torch.int32, salt)
        total = comm.all_reduce(torch.tensor([comm.rank + salt]))
        assert total.item() == sum(range(comm.size)) + salt * comm.size


CHECKS = (
    all_reduce_sums_in_place,
    all_reduce_gives_the_same_bits_everywhere,
    all_reduce_changes_only_its_slice,
    all_reduce_of_a_strided_view_is_right_or_refused,
    all_to_all_gives_ones_own_buffer_without_a_copy,
    all_to_all_takes_any_lengths,
    all_to_all_takes_large_messages,
    all_to_all_v_is_in_rank_order,
    all_gather_v_is_in_rank_order,
    send_recv_of_neither_half_is_nothing,
    send_recv_goes_around_a_ring,
    send_recv_swaps_pairs,
    send_recv_does_one_half,
    senders_may_overwrite_their_buffers,
    sent_buffers_may_be_overwritten_after_send_recv,
    many_calls_stay_in_step,
)


def check_contract(comm: Comm) -> None:
    for check in CHECKS:
        try:
            check(comm)
        except BaseException as error:
            error.add_note(f"{check.__name__} on rank {comm.rank} of {comm.size}")
            raise


def prepared_processes() -> Any:
    """Processes that begin with torch and all that tests need already there: importing it takes seconds each time.

    One server serves all tests of a run, so all of them must ask for the same modules.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "gradsieve.ddp", "comm_contract", "ddp_faults"])
    return context


def run_gloo(worker: Callable[..., Any], size: int, folder: Path, *, timeout_seconds: float = 150.0) -> list[Any]:
    """Run `worker(rank, folder)` in real processes of one Gloo world: what each returned, None if it died.

    A rank that raises is reported with its traceback. Whoever still runs after the timeout is killed; after a
    failure that comes sooner.
    """
    context = prepared_processes()
    ranks = [context.Process(target=_gloo_rank, args=(worker, rank, size, folder), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_seconds
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(folder.glob("failure-*")):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join()
    failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
    assert not failures, "\n".join(path.read_text() for path in failures)
    assert not late, f"ranks {late} were still running after {timeout_seconds:g} s"
    outcomes = [folder / f"outcome-{rank}" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in outcomes]


def _gloo_rank(worker: Callable[..., Any], rank: int, size: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        timeout = timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        outcome = json.dumps(worker(rank, folder))
    except BaseException:
        (folder / f"failure-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    (folder / f"outcome-{rank}").write_text(outcome)


class SomeLink:
    """As much of a `Link` as one end of a connection needs."""

    rank = 0
    timeout_seconds = 0.2
    room_for = Link.room_for

    def lost(self, peer: int | None, error: BaseException) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: lost rank {peer} ({error})", peer=peer)


def told_of_loss(comm: Comm) -> tuple[str, float]:
    """What a rank is told when it goes on calling though a peer does not, and after how many seconds."""
    began = time.perf_counter()
    try:
        for _ in range(3):
            list(comm.all_to_all([torch.ones(600_000)] * comm.size))
    except PeerLostError as error:
        return str(error), time.perf_counter() - began
    return "nothing", time.perf_counter() - began


def told_of_kill(comm: Comm, victim: int, folder: Path) -> tuple[str, float] | None:
    """One rank kills itself; what the others are told. All of them wait for each other: who ended would be lost too."""
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    told = told_of_loss(comm)
    (folder / f"told-{comm.rank}").touch()
    while not all((folder / f"told-{other}").exists() for other in range(comm.size) if other != victim):
        time.sleep(0.02)
    return told


def assert_all_were_told(outcomes: list[Any], victim: int, within_seconds: float) -> None:
    """Of `told_of_kill`, on every rank."""
    assert outcomes[victim] is None
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            sentence, seconds = outcome
            assert sentence.startswith(f"rank {rank}: lost rank {victim} ")
            assert seconds < within_seconds


def observed_after_calls(comm: Comm, count: int, look: Callable[[], Any]) -> list[Any]:
    """What `look` returns after each of some calls; then the process group is destroyed."""
    observed = []
    for _ in range(count):
        list(comm.all_to_all([torch.ones(3)] * comm.size))
        observed.append(look())
    dist.barrier()
    dist.destroy_process_group()
    return observed
