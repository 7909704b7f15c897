"""What the ranks' connections and memory can do: latency, bandwidth per pair and of all pairs at once, selection.

Messages go through `TorchComm`, as those of every recipe do: its own connections between machines, and shared memory
inside one machine.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsieve.comm import Comm
from gradsieve.lab.bench.gradients import Gradients
from gradsieve.lab.bench.select import SieveContender
from gradsieve.lab.tune.interfaces import Interfaces, interfaces
from gradsieve.lab.tune.together import decided, gathered
from gradsieve.selectors.threshold import Threshold

PINGS = 9
CONNECT_CALLS = 14  # after 12 calls the ranks connect to each other
SMALLEST_BYTES, LARGEST_BYTES = 1 << 14, 1 << 24
LONG_ENOUGH_SECONDS = 0.06  # a message that takes this long measures bandwidth, not latency and not a burst
ONE_BY_ONE = 8  # ranks up to which each pair is measured alone; with more, disjoint pairs are measured together
MEMORY_ENTRIES = 1 << 24
SELECT_ENTRIES = 1 << 22
SELECT_DENSITY = 0.01

Tell = Callable[[str, int, int], None]


class Pair(NamedTuple):
    """Two ranks."""

    low: int
    high: int
    latency_seconds: float  # half a round trip
    bits_per_second: float  # from one to the other, the slower of both directions
    both_ways_bits_per_second: float  # in each direction while both send


@dataclass(frozen=True)
class Physical:
    """Measurements of the world."""

    pairs: list[Pair]
    all_pairs_bits_per_second: float  # that each rank receives while all send to all; the slowest rank's
    memory_bytes_per_second: float  # read and written by one rank while all ranks copy
    select_entries_per_second: float
    hosts: list[Interfaces]  # one per machine or host of the laboratory
    on_one_machine: bool

    @property
    def latency_seconds(self) -> float:
        return statistics.median(pair.latency_seconds for pair in self.pairs)

    @property
    def seconds_per_byte(self) -> float:
        """Of what one rank receives in an exchange among all."""
        return 8 / self.all_pairs_bits_per_second


def measure_physical(comm: Comm, tell: Tell) -> Physical:
    """All ranks call it together."""
    for _ in range(CONNECT_CALLS):
        comm.all_gather_v(torch.zeros(1))
    rounds = pair_rounds(comm.size)
    pairs: list[Pair] = []
    for number, alongside in enumerate(rounds):
        own = next((pair for pair in alongside if comm.rank in pair), None)
        found = gathered(_pair(comm, own))
        pairs += [pair for pair in found if pair is not None]
        tell("pairs", number + 1, len(rounds))
    together = _all_pairs(comm)
    tell("memory and selection", 0, 1)
    memory, selection = min(gathered(_memory())), min(gathered(_selection(comm.rank)))
    tell("memory and selection", 1, 1)
    hosts = gathered((_host_name(), interfaces()))
    return Physical(
        sorted(pairs), together, memory, selection, list(dict(hosts).values()), len({name for name, _ in hosts}) == 1
    )


def pair_rounds(size: int) -> list[list[tuple[int, int]]]:
    """All pairs, one per round; with many ranks a tournament, whose rounds have disjoint pairs."""
    if size <= ONE_BY_ONE:
        return [[(low, high)] for low in range(size) for high in range(low + 1, size)]
    seats = size + size % 2
    rounds = []
    for turn in range(seats - 1):
        order = [0, *((number + turn) % (seats - 1) + 1 for number in range(seats - 1))]
        pairs = [(min(a, b), max(a, b)) for a, b in zip(order, reversed(order), strict=True)][: seats // 2]
        rounds.append(sorted(pair for pair in pairs if pair[1] < size))
    return rounds


def _pair(comm: Comm, pair: tuple[int, int] | None) -> Pair | None:
    """One pair's measurements, on its lower rank. Ranks without a pair go on at once."""
    if pair is None:
        return None
    low, high = pair
    other = high if comm.rank == low else low
    latency = _latency(comm, other, first=comm.rank == low)
    forth = _bandwidth(comm, other, comm.rank == low, comm.rank == high)
    back = _bandwidth(comm, other, comm.rank == high, comm.rank == low)
    both = _bandwidth(comm, other, True, True)
    return Pair(low, high, latency, min(forth, back), both) if comm.rank == low else None


def _latency(comm: Comm, other: int, first: bool) -> float:
    small, times = torch.zeros(1), []
    for _ in range(PINGS):
        began = time.perf_counter()
        if first:
            comm.send_recv(small, other, None)
            comm.send_recv(small, None, other)
        else:
            comm.send_recv(small, None, other)
            comm.send_recv(small, other, None)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / 2


def _bandwidth(comm: Comm, other: int, sends: bool, receives: bool) -> float:
    """Bits per second. Messages grow until one takes long; both ranks use the slower one's time.

    A receiver confirms each message, so that the sender's time is not that of filling its system's buffers.
    """
    size = SMALLEST_BYTES
    while True:
        message = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        comm.send_recv(message, other if sends else None, other if receives else None)
        comm.send_recv(message[:1], other if receives else None, other if sends else None)
        own = torch.tensor([time.perf_counter() - began])
        peers = comm.send_recv(own, other, other)
        assert peers is not None
        seconds = max(float(own), float(peers))
        if seconds >= LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES:
            return 8 * size / seconds
        size = _next_size(size, seconds)


def _next_size(size: int, seconds: float) -> int:
    """At most eight times as long a message: the first ones measure latency more than bandwidth."""
    wanted = size * 1.3 * LONG_ENOUGH_SECONDS / seconds
    return int(min(max(wanted, 2 * size), 8 * size, LARGEST_BYTES))


def _all_pairs(comm: Comm) -> float:
    """Bits per second that the slowest rank receives while all send to all."""
    size = SMALLEST_BYTES
    while True:
        message = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            comm.all_gather_v(message)
            times.append(max(gathered(time.perf_counter() - began)))
        seconds = decided(lambda times=times: statistics.median(times))  # type: ignore[misc]
        if seconds >= LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES:
            return float(8 * size * (comm.size - 1) / seconds)
        size = _next_size(size, seconds)


def _memory() -> float:
    source = torch.ones(MEMORY_ENTRIES)
    target = torch.zeros(MEMORY_ENTRIES)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * 4 * MEMORY_ENTRIES / min(times)


def _selection(rank: int) -> float:
    """Entries per second of accumulating a gradient and selecting 1 % of it by threshold."""
    gradients = Gradients(SELECT_ENTRIES, rank=rank)
    contender = SieveContender(Threshold(), gradients.fresh(), int(SELECT_DENSITY * SELECT_ENTRIES))
    times = [contender.step(gradients.fresh()).seconds for _ in range(10)][3:]
    return SELECT_ENTRIES / statistics.median(times)


def _host_name() -> str:
    """This machine, or this host of the laboratory."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
