"""Faults of a real network: a cable pulled and plugged in, a host that vanishes, one that is much slower."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradsieve import Comm, PeerLostError, TorchComm
from gradsieve.lab.network import Network
from gradsieve.lab.rank_processes import RankProcess, RankProcessError
from gradsieve.pipeline import Pipeline
from gradsieve.recipes import recipe
from gradsieve.testing import run_ranks
from gradsieve.vector.pieces import Pieces
from support import networks

HOSTS = 3
NUMEL = 200_000
K = 20_000
STEPS = 6
FAULT_STEP = 2
SLOW_STEP = 4
DROP_SECONDS = 5.0
TIMEOUT_SECONDS = 3.0


@pytest.fixture
def network() -> Iterator[Network]:
    networks.require_networks()
    with Network(HOSTS, "10mbit", name=networks.unique_name()) as built:
        parts = {host.namespace for host in built.site.hosts}
        yield built
    assert not parts & networks.namespaces()


def train(comm: Comm, on_step: Callable[[int], None] = lambda step: None) -> list[str]:
    """Some Ok-Topk steps on gradients that only depend on rank and step; a digest of every result."""
    pipeline = Pipeline(recipe("oktopk"), comm)
    out = torch.empty(NUMEL)
    state = pipeline.init(Pieces([out]))
    digests = []
    for step in range(STEPS):
        chance = torch.Generator().manual_seed(100 * step + comm.rank)
        grad = torch.randn(NUMEL, generator=chance)
        on_step(step)
        state = pipeline.step(grad, K, state, out)
        digests.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    return digests


def train_in_host(process: RankProcess) -> tuple[list[str], list[float]]:
    started: list[float] = []

    def on_step(step: int) -> None:
        started.append(time.monotonic())
        if process.rank == 0:
            process.report(step)

    digests = train(TorchComm(timeout_seconds=60), on_step)
    ends = [*started[1:], time.monotonic()]
    return digests, [end - start for start, end in zip(started, ends, strict=True)]


def test_a_pulled_cable_and_a_host_ten_times_slower_only_cost_time(network: Network) -> None:
    faults: list[threading.Thread] = []

    def on_report(step: int) -> None:
        if step == FAULT_STEP:
            fault = threading.Thread(target=network.link(1).drop, args=(DROP_SECONDS,))
            fault.start()
            faults.append(fault)
        elif step == SLOW_STEP:
            network.link(2).set_rate("1mbit")

    measured = network.run_rank_processes(train_in_host, on_report=on_report)
    for fault in faults:
        fault.join(30)
    assert [digests for digests, _ in measured] == run_ranks(HOSTS, train)
    for _, seconds in measured:
        assert max(seconds) > DROP_SECONDS - 1, "the cable was pulled between steps, not during one"
        assert seconds[-1] > 0.5, "what takes 80 ms at 10 Mbit/s cannot be quicker at 1 Mbit/s"


def train_until_lost(process: RankProcess) -> None:
    def on_step(step: int) -> None:
        if process.rank == 0:
            process.report(step)

    train(TorchComm(timeout_seconds=60))  # kernels compile here, not within the short timeout
    try:
        train(TorchComm(timeout_seconds=TIMEOUT_SECONDS), on_step)
    except PeerLostError as error:
        process.report((process.rank, str(error)))
        time.sleep(2 * TIMEOUT_SECONDS)  # so that everybody else can report too, before the run ends
        raise


@pytest.mark.long
def test_when_a_host_is_cut_off_everybody_is_told_within_the_timeout(network: Network) -> None:
    told: dict[int, str] = {}

    def on_report(content: Any) -> None:
        if content == FAULT_STEP:
            network.link(2).down()
        elif isinstance(content, tuple):
            told[content[0]] = content[1]

    with pytest.raises(RankProcessError, match=r"lost rank \d or had no answer within 3 s"):
        network.run_rank_processes(train_until_lost, on_report=on_report)
    assert set(told) == set(range(HOSTS))
    assert "lost rank 2" in told[0] or "lost rank 2" in told[1]


def test_when_a_host_vanishes_the_run_ends_and_names_it(network: Network) -> None:
    def on_report(content: Any) -> None:
        if content == FAULT_STEP:
            network.vanish(2)

    with pytest.raises(RankProcessError, match=r"^rank 2 ended without an error message, by signal SIGKILL"):
        network.run_rank_processes(train_until_lost, on_report=on_report)
    assert not network.link(2).is_up()
    assert network.site.hosts[2].processes() == []
