"""The network laboratory: what is built is what was asked for, ranks live in it, nothing stays behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsieve import InputError
from gradsieve.cli import main
from gradsieve.lab.network import Network, NetworkError, Rate, Topology, interface_counters
from gradsieve.lab.network import iproute as tools
from gradsieve.lab.network.claim import read_claim
from gradsieve.lab.network.host import Host
from gradsieve.lab.rank_processes import RankProcess, RankProcessError
from support import networks

NAME = networks.unique_name()


def unclaimed() -> set[str]:
    """Namespaces of laboratories that no state file knows; others may build and remove theirs while we look."""
    left: set[str] = set()
    for _ in range(10):
        left = {name for name in networks.namespaces() if name.startswith("gradsieve-")}
        claims = [read_claim(path.stem) for path in Path("/run/gradsieve").glob("*.json")]
        known = tuple(f"gradsieve-{claim.site.identity}-" for claim in claims if claim is not None)
        left = {name for name in left if not name.startswith(known)}
        if not left:
            break
        time.sleep(0.2)
    return left


@pytest.fixture
def clean() -> Iterator[None]:
    """A network can be built, and all of it is gone afterwards."""
    networks.require_networks()
    before = networks.interfaces()
    yield
    assert not unclaimed(), "namespaces were left behind"
    assert not networks.state_files()
    assert networks.interfaces() == before


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 25 * 10**8), ("100kbit", 10**5), ("unlimited", None)],
)
def test_rates(text: str, bits: int | None) -> None:
    rate = Rate.parse(text)
    assert rate.bits_per_second == bits
    assert Rate.parse(str(rate)) == rate
    assert bool(rate.bucket) == (bits is not None)


@pytest.mark.parametrize("text", ["", "fast", "1", "-1gbit", "0mbit", "1kbit", "1000gbit", "1gbyte", "1 gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"such as 250mbit, got {text!r}")):
        Rate.parse(text)


@pytest.mark.parametrize("rate", ["100kbit", "10mbit", "100mbit", "1gbit", "10gbit"])
def test_a_bucket_holds_a_whole_packet_and_little_more_than_a_millisecond(rate: str) -> None:
    limit = Rate.parse(rate)
    burst = int(limit.bucket[limit.bucket.index("burst") + 1].removesuffix("b"))
    assert burst >= 1.2 * limit.packet_bytes
    assert limit.bits_per_second is not None
    assert burst <= max(2e-3 * limit.bits_per_second / 8, 1.25 * 4096)


def test_topology_says_who_is_different() -> None:
    topology = Topology.of(4, "1gbit", {3: "100mbit"})
    assert topology.rates == ("1gbit", "1gbit", "1gbit", "100mbit")
    assert str(topology) == "4 hosts at 1gbit (host 3 100mbit)"
    assert [topology.address(host) for host in (0, 3)] == ["198.18.0.1", "198.18.0.4"]
    assert str(Topology.of(2, "1gbit", latency="2.5ms")) == "2 hosts at 1gbit, 2.5 ms apart"


@pytest.mark.parametrize("latency", ["", "5", "-1ms", "3s", "5 ms", "soon"])
def test_what_is_no_latency(latency: str) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"latency must be between 0ms and 2s, such as 5ms, got {latency!r}")
    ):
        Topology.of(2, "1gbit", latency=latency)


@pytest.mark.parametrize(
    ("hosts", "others", "sentence"),
    [
        (0, {}, "hosts must be between 1 and 64, got 0"),
        (65, {}, "hosts must be between 1 and 64, got 65"),
        (2, {2: "1gbit"}, "there is no host 2 to give a rate: hosts are 0 to 1"),
        (2, {1: "slow"}, "got 'slow'"),
    ],
)
def test_what_is_no_topology(hosts: int, others: dict[int, str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Topology.of(hosts, "1gbit", others)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    laboratory = (["up"], ["down"], ["status"], ["run", "--", "true"], ["link", "0", "down"], ["enter", "true"])
    for command in [*(["lab", *rest] for rest in laboratory), ["bench", "reduce", "--network", "1gbit"]]:
        assert main(command) == 2
        assert capsys.readouterr().err == (
            f"gradsieve: error: networks need Linux, this is {platform}: without --network, benchmarks run over "
            "loopback\n"
        )


def test_windows_can_import_the_benchmarks() -> None:
    """They import the laboratory, for its names of networks. Windows has no fcntl."""
    code = "import sys; sys.modules['fcntl'] = None; import gradsieve.lab.bench.site"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_become_file_names() -> None:
    with pytest.raises(InputError, match="got '../etc'"):
        Network(2, name="../etc")


def test_a_network_outside_its_block() -> None:
    with pytest.raises(InputError, match="exists only within its `with` block"):
        Network(2).link(0)


def test_the_kernel_has_what_was_asked_for(clean: None) -> None:
    with Network(3, "250mbit", host_rates={1: "unlimited", 2: "10mbit"}, name=NAME) as network:
        assert [str(network.link(host).rate()) for host in range(3)] == ["250mbit", "unlimited", "10mbit"]
        network.link(0).set_rate("unlimited")
        network.link(1).set_rate("1gbit")
        assert [str(network.link(host).rate()) for host in range(3)] == ["unlimited", "1gbit", "10mbit"]
        assert network.link(2).is_up()
        assert [counted.bytes_received for counted in network.counters()] == [0, 0, 0], "not a quiet network"
        network.link(2).down()
        assert not network.link(2).is_up()
        with pytest.raises(InputError, match="there is no host 3: hosts are 0 to 2"):
            network.link(3)
        with pytest.raises(NetworkError, match=f"{NAME}' is in use by process {os.getpid()}"):
            Network(2, name=NAME).__enter__()


def reduce_sixteen_megabytes(process: RankProcess) -> list[tuple[float, int]]:
    tensor = torch.ones(2_000_000)
    measured = []
    for _ in range(3):
        tensor.fill_(process.rank)
        before = interface_counters()
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds = time.perf_counter() - started
        assert tensor.unique().tolist() == [1]
        measured.append((seconds, interface_counters().since(before).bytes_received))
    return measured


def test_links_are_as_slow_as_they_say_and_counters_see_the_payload(clean: None) -> None:
    """Two ranks move 8 MB each way; never sooner than the limit lets them. Later is the machine's business."""
    with Network(2, "200mbit", name=NAME) as network:
        outside = network.counters()
        measured = network.run_rank_processes(reduce_sixteen_megabytes)
        moved = [now.since(then) for now, then in zip(network.counters(), outside, strict=True)]
    for rank in measured:
        assert min(seconds for seconds, _ in rank) > 0.95 * 8e6 * 8 / 200e6
        received = statistics.median(count for _, count in rank)
        assert 8e6 < received < 8e6 * 1.06
    for host in moved:
        assert 3 * 8e6 < host.bytes_received < 3 * 8e6 * 1.06


def in_host(host: Host, work: Callable[[], Any]) -> Any:
    """Run in a thread of its own inside a host; the rest of this process stays outside."""
    with ThreadPoolExecutor(1, initializer=host.enter) as executor:
        return executor.submit(work).result(timeout=60)


def test_latency_is_added_to_every_way_and_nothing_is_lost(clean: None) -> None:
    sent = random.Random(1).randbytes(3_000_000)
    with Network(2, "100mbit", latency="15ms", name=NAME) as network, ExitStack() as stack:
        near, far = network.site.hosts
        listener = stack.enter_context(in_host(far, lambda: socket.create_server(("198.18.0.2", 5000))))
        client = in_host(near, lambda: socket.create_connection(("198.18.0.2", 5000), timeout=60))
        stack.enter_context(client)
        server = stack.enter_context(listener.accept()[0])
        for connection in (client, server):
            connection.settimeout(60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def round_trip() -> float:
            started = time.monotonic()
            client.sendall(b"?")
            server.recv(1)
            server.sendall(b"!")
            client.recv(1)
            return time.monotonic() - started

        assert min(round_trip() for _ in range(5)) >= 0.030
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        with server.makefile("rb") as stream:
            arrived = stream.read(len(sent))
        sender.join(60)
        assert arrived == sent
        network.link(0).drop(0.3)
        assert round_trip() >= 0.030


def test_an_exception_leaves_nothing_behind(clean: None) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"), Network(2, name=NAME):
        raise ZeroDivisionError("on purpose")


def test_a_network_that_cannot_be_finished_leaves_nothing_behind(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rate, "bucket", property(lambda rate: ["no-such-discipline"]))
    with pytest.raises(NetworkError, match=r"^tc -n gradsieve-\w+-host0 qdisc replace .* unknown"):
        Network(2, name=NAME).__enter__()


def fail(process: RankProcess) -> None:
    if process.rank == 1:
        raise ZeroDivisionError("no way")
    dist.barrier()


def test_the_worker_that_failed_is_named(clean: None) -> None:
    with Network(2, name=NAME) as network, pytest.raises(RankProcessError, match="^rank 1: ZeroDivisionError: no way"):
        network.run_rank_processes(fail)


def test_counters_outside_a_host() -> None:
    with pytest.raises(NetworkError, match="there is no interface 'nic7' here"):
        interface_counters("nic7")


class Commands:
    """The command line under this test's own laboratory name."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, command: str, *arguments: str) -> tuple[int, str, str]:
        code = main(["lab", command, "--name", NAME, *arguments])
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def lab(clean: None, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    commands = Commands(capsys)
    yield commands
    commands("down")


def test_up_run_link_down(lab: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    built = "2 hosts at 1gbit (host 1 10mbit): 198.18.0.1 to 198.18.0.2\n"
    assert lab("up", "--hosts", "2", "--slow-host", "1=10mbit") == (0, built, "")
    code, _, said = lab("up", "--hosts", "2")
    assert code == 2
    assert f"{NAME!r} is up already: gradsieve lab down --name {NAME} removes it" in said

    told = "echo $RANK of $WORLD_SIZE, $MASTER_ADDR:$MASTER_PORT, $GLOO_SOCKET_IFNAME"
    code, out, said = lab("run", "--port", "4711", "--", "sh", "-c", told)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[0] 0 of 2, 198.18.0.1:4711, eth0",
        "[1] 1 of 2, 198.18.0.1:4711, eth0",
    ]
    assert "host 1: received 0 bytes, sent 0 bytes (10mbit)" in said

    assert lab("link", "1", "rate", "20mbit")[0] == 0
    assert lab("link", "0", "down")[0] == 0
    main(["lab", "status"])
    shown = capsys.readouterr().out
    assert re.search(r"host 0  198.18.0.1  1gbit  link DOWN", shown)
    assert re.search(r"host 1  198.18.0.2  20mbit  link up", shown)

    assert lab("down") == (0, f"{NAME}: removed\n", "")
    assert lab("down") == (0, f"{NAME}: nothing to remove\n", "")


FAIL_WHEN_ALL_ARE_READY = """
if [ $RANK = 1 ]; then
  while [ ! -e $0/0 ] || [ ! -e $0/2 ]; do sleep 0.02; done
  echo no >&2; exit 3
fi
sleep 600 &
touch $0/$RANK; sleep 600
"""


def test_a_run_ends_with_the_first_that_fails(lab: Commands, tmp_path: Path) -> None:
    lab("up", "--hosts", "3")
    code, _, said = lab("run", "--", "sh", "-c", FAIL_WHEN_ALL_ARE_READY, str(tmp_path))
    assert code == 3
    assert "[1] no\n" in said
    claim = read_claim(NAME)
    assert claim is not None
    assert [host.processes() for host in claim.site.hosts] == [[], [], []]
    assert lab("run", "--host", "2", "--", "sh", "-c", "kill -9 $$")[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--", "true"], "is not up: gradsieve lab up"),
        (["link", "0", "up"], "is not up: gradsieve lab up"),
        (["link", "0", "rate"], "link rate takes a value"),
        (["link", "0", "down", "3"], "link down takes no value"),
        (["up", "--rate", "quick"], "got 'quick'"),
        (["up", "--slow-host", "3"], "host-rate must be HOST=RATE, such as 3=100mbit, got '3'"),
        (["up", "--hosts", "0"], "hosts must be at least 1, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence(lab: Commands, arguments: list[str], sentence: str) -> None:
    code, out, said = lab(*arguments)
    assert (code, out) == (2, "")
    assert said.count("\n") == 1
    assert sentence in said


def test_only_what_was_created_is_removed(lab: Commands) -> None:
    """Namespaces of somebody else stay, also under a name that looks like ours."""
    other = f"gradsieve-{NAME}-other"
    tools.add_namespace(other)
    try:
        lab("up", "--hosts", "2")
        lab("down")
        main(["lab", "down", "--all"])
        assert other in networks.namespaces()
    finally:
        tools.ip("netns", "delete", other)


WITH = f"""
import sys, time
from gradsieve.lab.network import Network
with Network(2, name={NAME!r}):
    print("ready", flush=True)
    time.sleep(600)
"""
RUN = [sys.executable, "-m", "gradsieve.cli", "lab", "run", "--name", NAME, "--hosts", "2", "--"]


def test_an_interrupted_block_leaves_nothing_behind(clean: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", WITH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    assert networks.state_files()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(clean: None, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*RUN, "sh", "-c", "echo ready; sleep 600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    networks.check_interrupted(process, number)


def ended(pid: int) -> bool:
    """Gone, or dead and only not yet asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_a_killed_run_left_is_recognised_and_removed(lab: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([*RUN, "sh", "-c", "echo ready; sleep 600"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(timeout=60)
    claim = read_claim(NAME)
    assert claim is not None
    left = [pid for host in claim.site.hosts for pid in host.processes()]
    assert left
    main(["lab", "status"])
    assert f"left behind by process {process.pid}" in capsys.readouterr().out
    assert lab("down")[1] == f"{NAME}: removed\n"
    assert all(ended(pid) for pid in left)
    process.stdout.close()


def test_a_new_network_replaces_what_a_killed_run_left(clean: None) -> None:
    process = subprocess.Popen([*RUN, "sh", "-c", "echo ready; sleep 600"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(timeout=60)
    with Network(2, name=NAME):
        pass
    process.stdout.close()
