"""Networks without root: the same networks, in a user namespace, and nothing of them left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import networks
from support.plain_users import SECONDS, PlainUser, container_root, eventually, plain_user

RATE = 20_000_000
PAYLOAD = 2_500_000  # a second at that rate
SEND = f"""
import os, socket, time
address = os.environ["MASTER_ADDR"], 5000
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(address).accept()
    started, left = time.monotonic(), {PAYLOAD}
    while left and (piece := connection.recv(1 << 16)):
        left -= len(piece)
    print("seconds", time.monotonic() - started, "missing", left)
    raise SystemExit(7)
while True:
    try:
        connection = socket.create_connection(address)
        break
    except OSError:
        time.sleep(0.05)
connection.sendall(bytes({PAYLOAD}))
connection.recv(1)
"""
BUILD = """
from gradsieve.lab.network import Network
with Network(2, "20mbit") as network:
    print(network.link(1).rate(), [counted.bytes_sent for counted in network.counters()])
"""
READY = "echo ready $$; sleep 600 & sleep 600"


@contextmanager
def nothing_left(user: PlainUser) -> Iterator[PlainUser]:
    """What a user's commands leave: no process, no state file, the machine's interfaces and namespaces as before."""
    before = networks.interfaces()
    named = set(Path("/run/netns").glob("*-host*"))
    yield user
    assert user.remaining() == {}
    assert user.states() == set()
    assert networks.interfaces() == before
    assert {path for path in Path("/run/netns").glob("*-host*") if path.stat().st_uid == user.id} <= named


@pytest.fixture
def user() -> Iterator[PlainUser]:
    with plain_user() as user, nothing_left(user):
        yield user


def check_limited_run(user: PlainUser) -> None:
    code, out, said = user.lab("run", "--hosts", "2", "--rate", "20mbit", "--", user.python, "-c", SEND)
    assert code == 7, said
    found = re.fullmatch(r"\[0\] seconds ([\d.]+) missing 0\n", out)
    assert found, out + said
    assert float(found[1]) > 0.95 * PAYLOAD * 8 / RATE
    received = re.search(r"host 0: received ([\d,]+) bytes", said)
    assert received
    assert PAYLOAD < int(received[1].replace(",", "")) < 1.1 * PAYLOAD


def test_a_run_is_limited_and_its_exit_code_arrives(user: PlainUser) -> None:
    check_limited_run(user)


def test_a_container_s_root_without_capabilities() -> None:
    with container_root() as user, nothing_left(user):
        check_limited_run(user)


def test_a_container_that_hides_parts_of_sys(user: PlainUser) -> None:
    """As most containers do: then no user may mount a /sys, and `ip -n` fails."""
    if os.geteuid() != 0:
        pytest.skip("hiding parts of /sys needs root")
    hide = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/kernel && exec "$@"', "sh")
    drop = ("setpriv", "--reuid", str(user.id), "--regid", str(user.id), "--clear-groups")
    inside = PlainUser(user.id, user.home, user.python, (*hide, *drop))
    refused = "unshare --user --map-root-user --mount --net mount -t sysfs none /sys"
    assert inside.run(*refused.split())[0] != 0, "this machine cannot be made such a container"
    check_limited_run(inside)


def test_a_network_that_stays(user: PlainUser) -> None:
    assert user.lab("up", "--hosts", "2", "--slow-host", "1=10mbit") == (
        0,
        "2 hosts at 1gbit (host 1 10mbit): 198.18.0.1 to 198.18.0.2\n",
        "",
    )
    code, _, said = user.lab("up")
    assert (code, said) == (
        2,
        "gradsieve: error: the laboratory 'lab' is up already: gradsieve lab down removes it\n",
    )
    told = "echo $RANK of $WORLD_SIZE in $PWD; ls /sys/class/net"
    code, out, _ = user.lab("run", "--", "sh", "-c", told)
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        f"[{host}] {line}" for host in (0, 1) for line in (f"{host} of 2 in {user.home}", "eth0", "lo")
    )
    assert user.lab("link", "0", "rate", "30mbit")[0] == 0
    assert user.lab("link", "1", "down")[0] == 0
    shown = json.loads(user.lab("status", "--json")[1])["laboratories"]["lab"]
    assert shown["state"] == "up"
    assert [(host["rate"], host["link_up"]) for host in shown["hosts"]] == [("30mbit", True), ("10mbit", False)]
    assert len(user.processes()) == 1, "only the guard stays"
    assert user.lab("up", "--name", "second", "--hosts", "1")[0] == 0
    assert user.lab("down", "--all")[1] == "lab: removed\nsecond: removed\n"
    assert user.lab("status") == (0, "no laboratory is up\n", "")


def test_without_a_network_nothing_is_entered(user: PlainUser) -> None:
    assert user.lab("down") == (0, "lab: nothing to remove\n", "")
    code, _, said = user.lab("run", "--", "true")
    assert (code, said) == (2, "gradsieve: error: the laboratory 'lab' is not up: gradsieve lab up builds it\n")


def test_enter_runs_a_script_that_builds_networks(user: PlainUser) -> None:
    assert user.lab("enter", "--", user.python, "-c", BUILD) == (0, "20mbit [0, 0]\n", "")
    assert user.lab("enter", "sh", "-c", "exit 5")[0] == 5
    code, _, said = user.lab("enter", "no-such-program")
    assert (code, said) == (
        2,
        "gradsieve: error: 'no-such-program' cannot be run: No such file or directory\n",
    )


def test_a_script_by_itself_is_told_how_to_be_started(user: PlainUser) -> None:
    code, _, said = user.run(user.python, "-c", BUILD)
    assert code == 1
    assert said.splitlines()[-1] == (
        "gradsieve.lab.network.errors.NetworkError: this process may not build networks: start it with "
        "`gradsieve lab enter -- COMMAND`, or as root, or use loopback"
    )


def test_inside_are_the_machine_s_network_and_this_user_s_files(user: PlainUser) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=20); open('made', 'w')"
        assert user.lab("enter", "--", user.python, "-c", code) == (0, "", "")
    assert (user.home / "made").stat().st_uid == user.id
    hidden = {path.name for path in Path("/run").iterdir()} - {"gradsieve", "netns"}
    hidden -= set(user.lab("enter", "ls", "/run")[1].split())
    assert not hidden


def test_a_network_of_a_shell_stays_after_it(user: PlainUser) -> None:
    program = " ".join(user.gradsieve)
    assert user.lab("enter", "sh", "-c", f"{program} lab up --hosts 1")[0] == 0
    assert user.lab("run", "--", "true")[0] == 0
    code, _, said = user.lab("enter", *user.gradsieve, "lab", "run", "--", "true")
    assert code == 2
    assert "is in another space: use it outside of `gradsieve lab enter`" in said
    assert user.lab("enter", *user.gradsieve, "lab", "down")[1] == "lab: removed\n"


def test_latency(user: PlainUser) -> None:
    ping = """
import os, socket, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 5000))
other = f"198.18.0.{2 - int(os.environ['RANK'])}", 5000
if os.environ["RANK"] == "1":
    while True:
        own.sendto(own.recv(1), other)
own.settimeout(1)
best, tries = 9.0, 0
while tries < 30 and not (tries > 5 and best < 9):
    started = time.monotonic()
    tries += 1
    try:
        own.sendto(b"?", other)
        own.recv(1)
        best = min(best, time.monotonic() - started)
    except OSError:
        time.sleep(0.05)
print(best, flush=True)
os._exit(3)
"""
    code, out, said = user.lab("run", "--hosts", "2", "--latency", "20ms", "--", user.python, "-c", ping)
    assert code == 3, said
    assert 0.040 <= float(out.removeprefix("[0] ")) < 9


@pytest.mark.timeout(900)  # the user's own kernels are compiled first
def test_a_benchmark(user: PlainUser) -> None:
    sizes = "--network 50mbit --ranks 2 --numel 20000 --repeats 2 --recipe oktopk --no-peers --json"
    code, out, said = user.run(*user.gradsieve, "bench", "reduce", *sizes.split(), seconds=850)
    assert code == 0, said
    rows = {row["recipe"]: row for row in json.loads(out)["results"]}
    assert rows["oktopk"]["network"] == "50mbit"
    assert rows["oktopk"]["interface_bytes_received_per_rank"] > 0


FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


@pytest.mark.parametrize(
    "command",
    [
        ("lab", "up"),
        ("lab", "run", "--hosts", "2", "--", "true"),
        ("lab", "enter", "true"),
        ("bench", "reduce", "--network", "1gbit"),
        ("bench", "wire", "--network", "1gbit"),
        ("bench", "overlap", "--network", "1gbit"),
        ("bench", "train", "resnet20", "--network", "1gbit"),
    ],
    ids=" ".join,
)
def test_where_namespaces_are_forbidden_one_sentence(user: PlainUser, command: tuple[str, ...]) -> None:
    """Forbidden by the machine's setting, within a user namespace of the test."""
    forbid = ("unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh")
    assert user.run(*forbid, *user.gradsieve, *command) == (
        2,
        "",
        "gradsieve: error: no network can be built here without root, because user.max_user_namespaces is 0: change "
        "that, run as root, or leave --network out (benchmarks then run over loopback)\n",
    )
    assert [path.name for path in user.home.iterdir()] == []


def test_a_root_that_may_not_even_map_itself() -> None:
    with container_root(("sys_admin", "net_admin", "setfcap")) as user:
        code, _, said = user.lab("up")
    assert code == 2
    assert "because user namespaces are refused (Operation not permitted)" in said


def test_a_folder_that_another_user_made_is_refused(user: PlainUser) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's folder needs root")
    folder = user.home / f"gradsieve-{user.id}"
    folder.mkdir()
    try:
        for command in (["up"], ["status"], ["down"], ["run", "--hosts", "1", "true"]):
            code, _, said = user.lab(*command)
            assert code == 2
            assert said.startswith(f"gradsieve: error: {folder} must be a folder that only this user")
            assert said.count("\n") == 1
    finally:
        folder.rmdir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run(user: PlainUser, number: signal.Signals) -> None:
    process = user.start(*user.gradsieve, "lab", "run", "--hosts", "2", "--", "sh", "-c", READY)
    networks.check_interrupted(process, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_while_its_network_is_built(user: PlainUser, number: signal.Signals) -> None:
    process = user.start(*user.gradsieve, "lab", "run", "--hosts", "20", "--", "sleep", "600")
    assert eventually(lambda: "lab.json" in user.states()), "the first that a network has is its state file"
    process.send_signal(number)
    out, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in said


def test_two_of_one_name_exclude_each_other(user: PlainUser) -> None:
    process = user.start(*user.gradsieve, "lab", "run", "--hosts", "2", "--", "sh", "-c", READY)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    code, _, said = user.lab("run", "--hosts", "1", "--", "true")
    assert code == 2
    assert f"the laboratory 'lab' is in use by process {process.pid}" in said
    assert "lab: in use\n  host 0  198.18.0.1  1gbit  link up" in user.lab("status")[1]
    assert user.lab("link", "1", "rate", "10mbit")[0] == 0
    process.terminate()
    process.communicate(timeout=60)


def test_a_killed_run_takes_all_its_processes_with_it(user: PlainUser) -> None:
    process = user.start(*user.gradsieve, "lab", "run", "--hosts", "2", "--latency", "1ms", "--", "sh", "-c", READY)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    assert len(user.processes()) >= 2 + 2 + 1, "commands, relays, guard"
    process.kill()
    process.communicate(timeout=60)
    assert user.remaining() == {}
    assert f"left behind by process {process.pid}" in user.lab("status")[1]
    assert user.lab("run", "--hosts", "1", "--", "true")[0] == 0


def test_a_killed_guard_leaves_what_down_removes(user: PlainUser) -> None:
    assert user.lab("up", "--hosts", "2", "--latency", "1ms")[0] == 0
    (guard,) = (process for process, line in user.processes().items() if "guard.py" in line)
    os.kill(guard, signal.SIGKILL)
    assert eventually(lambda: guard not in user.processes())
    assert len(user.processes()) == 2, "the relays"
    assert "left behind" in user.lab("status")[1]
    assert "is not up: gradsieve lab up builds it" in user.lab("run", "--", "true")[2]
    assert user.lab("down")[1] == "lab: removed\n"
    assert user.remaining() == {}


def test_a_guard_s_number_that_another_process_has_is_not_believed(user: PlainUser) -> None:
    assert user.lab("up", "--hosts", "1")[0] == 0
    state = user.home / f"gradsieve-{user.id}" / "lab.json"
    claim = json.loads(state.read_text())
    claim["guard"]["started"] -= 1
    state.write_text(json.dumps(claim))
    assert "is not up: gradsieve lab up builds it" in user.lab("run", "--", "true")[2]
    assert user.lab("down")[1] == "lab: removed\n"
