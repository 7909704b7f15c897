"""`gradsieve tune` on real ranks: alone, under torchrun, with a model; what it prints, and every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsieve.cli import main
from gradsieve.comm.transport.address import TcpAddresses
from gradsieve.errors import GradsieveError
from gradsieve.lab.tune.interfaces import interfaces
from gradsieve.lab.tune.reach import check_pairs
from support.torchrun import ROOT

TINY = ("--parameters", "40K", "--recipe", "oktopk", "onebit", "--density", "0.01", "--values", "exact")
MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return model, lambda m: m(torch.randn(8, 64)).square().mean()

def nothing():
    return None

def broken():
    return nn.Linear(3, 3), lambda m: m(torch.randn(2, 5)).sum()
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "job_of_tune_tests.py").write_text(MODEL)
    return tmp_path


def test_alone_it_measures_predicts_checks_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "steps.png"
    code = main(["tune", "--ranks", "2", *TINY, "--check", "--json", "--plot", str(picture)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    printed = json.loads(captured.out)
    (tuned,) = printed["tunings"]
    assert (tuned["ranks"], tuned["parameters"], tuned["network"]) == (2, 40_000, "loopback")
    check_measured(tuned["measured"])
    methods = {row["method"]: row for row in tuned["methods"]}
    assert {"oktopk 1%", "onebit 25%", "onebit 50%", "onebit 100%", "dense", "bf16", "powersgd-1"} <= set(methods)
    seconds = [row["seconds"] for row in tuned["methods"]]
    assert seconds == sorted(seconds)
    assert min(seconds) > 0
    advice = tuned["recommendation"]
    assert advice["line"] == methods[advice["method"]]["line"]
    assert advice["dense_is_better"] == (advice["method"] == "dense")
    checkable = [row["method"] for row in tuned["methods"] if not row["method"].startswith("powersgd")]
    assert [each["method"] for each in tuned["check"]] == checkable[:3]
    for each in tuned["check"]:
        assert each["predicted_seconds"] == pytest.approx(methods[each["method"]]["seconds"])
        assert each["error"] == pytest.approx(each["predicted_seconds"] / each["measured_seconds"] - 1)
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_measured(measured: dict[str, Any]) -> None:
    (pair,) = measured["pairs"]
    assert (pair["low"], pair["high"]) == (0, 1)
    assert 0 < measured["latency_seconds"] < 10
    for name in ("bits_per_second", "both_ways_bits_per_second"):
        assert pair[name] > 0
    for name in ("all_pairs_bits_per_second", "memory_bytes_per_second", "select_entries_per_second"):
        assert measured[name] > 0
    assert measured["on_one_machine"]
    assert len(measured["hosts"]) == 1


def test_a_table_ends_with_the_line_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--ranks", "2", *TINY, "--compute-seconds", "0.001"]) == 0
    captured = capsys.readouterr()
    assert "Latency:" in captured.out
    assert "NIC" in captured.out
    assert "40,000 parameters, 1 ms of computing" in captured.out
    last = captured.out.strip().splitlines()[-1].strip()
    assert last.startswith(("sieve = gradsieve.attach(model", "model = DistributedDataParallel(model)"))
    assert "docs/optimizers.md" in captured.out


def test_a_model_of_the_users_is_timed_and_checked(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "job_of_tune_tests:build"
    assert main(["tune", "--ranks", "2", "--model", name, "--recipe", "onebit", "--check", "--json"]) == 0
    (tuned,) = json.loads(capsys.readouterr().out)["tunings"]
    assert tuned["parameters"] == 2 * (64 * 64 + 64)
    assert tuned["compute_seconds"] > 0
    assert len(tuned["check"]) == 3


def under_torchrun(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "gradsieve", "tune", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=folder)


def test_under_torchrun_rank_0_prints() -> None:
    done = under_torchrun(*TINY, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (tuned,) = json.loads(done.stdout)["tunings"]
    assert (tuned["network"], tuned["ranks"]) == ("torchrun", 2)


def test_under_torchrun_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "job_of_tune_tests.py").write_text(MODEL)
    done = under_torchrun("--model", "job_of_tune_tests:nothing", folder=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("gradsieve: error: ") == 1
    assert "must return a pair (model, loss)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "1"], "tune needs at least 2 ranks, since one exchanges nothing, got 1: use --ranks 4"),
        (["--ranks", "0"], "ranks must be at least 1, got 0"),
        (["--parameters", "-5"], "parameters must be at least 1, got -5"),
        (["--parameters", "many"], "parameters must be a whole number, got 'many'"),
        (["--compute-seconds", "0"], "compute-seconds must be a positive number, got 0"),
        (["--compute-seconds", "nan"], "compute-seconds must be a positive number, got nan"),
        (["--density", "2"], "density must be in (0, 1], got 2"),
        (["--recipe", "oktop"], "unknown recipe 'oktop'; did you mean 'oktopk'?"),
        (["--values", "int9"], "'int9'"),
        (["--model", "train"], "--model must be module:function, such as train:build, got 'train'"),
        (["--model", "no_such_module:f"], "--model no_such_module:f: cannot import no_such_module"),
        (["--model", "json:f"], "--model json:f: module json has no function f"),
        (["--model", "json:loads", "--parameters", "5"], "leave out --parameters"),
        (["--model", "json:loads", "--compute-seconds", "5"], "leave out --compute-seconds"),
        (["--parameters", "9e12", "--check"], "GB of memory"),
        (["--network", "fast"], "a rate must be unlimited or between"),
        (["--plot", "no/such/folder/x.png"], "cannot write to no/such/folder/x.png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradsieve: error: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("nothing", "nothing() must return a pair (model, loss), where loss(model) runs one batch"),
        ("broken", "a training step failed (RuntimeError"),
    ],
)
def test_a_model_that_does_not_work_is_one_sentence(
    function: str, sentence: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--ranks", "2", "--model", f"job_of_tune_tests:{function}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert sorted(path.name for path in in_folder.iterdir() if path.suffix) == ["job_of_tune_tests.py"]


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def sentences_of(size: int) -> list[str]:
    """What `check_pairs` says on each rank; the ranks are threads with one store."""
    store, said = dist.HashStore(), [""] * size

    def run(rank: int) -> None:
        try:
            check_pairs(store, rank, size)
        except GradsieveError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said


@pytest.mark.usefixtures("on_loopback")
def test_pairs_that_connect_pass() -> None:
    assert sentences_of(3) == ["", "", ""]


@pytest.mark.usefixtures("on_loopback")
def test_an_unreachable_pair_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = TcpAddresses.listen
    refused = threading.Semaphore(1)

    def gone(self: TcpAddresses, num_peers: int) -> Any:
        """The first rank that listens tells a port that no process listens on."""
        listener = listen(self, num_peers)
        return listener._replace(address=b"1 127.0.0.1") if refused.acquire(blocking=False) else listener

    monkeypatch.setattr(TcpAddresses, "listen", gone)
    said = sentences_of(3)
    assert len(set(said)) == 1
    assert "cannot connect to rank" in said[0]
    assert "(127.0.0.1:1): Connection refused; check firewalls" in said[0]


def test_interfaces_with_a_carrier_and_a_device_are_counted(tmp_path: Path) -> None:
    for name, kind, carrier, device in [
        ("lo", "772", "1", False), ("eth0", "1", "1", True), ("eth1", "1", "0", True), ("docker0", "1", "1", False),
    ]:  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(kind)
        (tmp_path / name / "carrier").write_text(carrier)
        if device:
            (tmp_path / name / "device").mkdir()
    found = interfaces(tmp_path)
    assert (found.physical, found.virtual) == (("eth0",), ("docker0",))
    assert "1 NIC with carrier (eth0)" in str(found)
    assert "unknown" in str(interfaces(tmp_path / "missing"))
