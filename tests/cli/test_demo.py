"""`gradsieve demo`: measured on a network, computed over loopback, and never one called the other."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsieve.cli import main
from gradsieve.cli.demo_output import next_steps, summary, table
from gradsieve.errors import InputError
from gradsieve.lab.bench.demo import CONTESTANTS, Demo, standings
from gradsieve.lab.bench.site import obstacle
from gradsieve.lab.network import NetworkError
from gradsieve.lab.train.comparison import least_time_first
from support import networks

STEPS, HOSTS = 4, 2
SHORT = ["demo", "--hosts", str(HOSTS), "--steps", str(STEPS)]
DENSE_BYTES = 4 * 1_735_690  # 2(P-1)/P times 4 bytes, for two ranks
LINK_BITS = 100e6


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.fixture(scope="module")
def over_loopback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo where no network can be built."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradsieve.lab.bench.site.Network.__enter__", refuse)
        assert main([*SHORT, "--out", str(folder)]) == 0
    return folder


def refuse(self: Any) -> None:
    raise NetworkError("the network laboratory needs root")


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "demo.json").read_text())
    return content


def test_over_loopback_the_time_on_the_links_is_computed(over_loopback: Path) -> None:
    content = content_of(over_loopback)
    assert content["demo"]["is_measured"] is False
    assert content["demo"]["obstacle"] == "the network laboratory needs root"
    rows = content["results"]
    assert [row["name"] for row in rows] == [contestant.name for contestant in CONTESTANTS]
    for row in rows:
        assert row["replicas_equal"] is True
        assert row["steps"] == row["curve"][-1][0] == STEPS
        transfer = 8 * row["bytes_received"] / STEPS / LINK_BITS
        assert row["seconds_per_step"] == pytest.approx(row["loopback_seconds_per_step"] + transfer)
        assert row["seconds"] == pytest.approx(row["curve"][-1][1]) == pytest.approx(STEPS * row["seconds_per_step"])
    dense, bf16, *ours = rows
    assert dense["bytes_received"] == STEPS * DENSE_BYTES
    assert bf16["times_fewer_bytes"] == 2
    assert all(row["times_fewer_bytes"] > 10 for row in ours)


def test_what_is_computed_is_not_called_measured(over_loopback: Path) -> None:
    from rich.console import Console

    content = content_of(over_loopback)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(content))
    assert captured.get().count("computed") == 3
    said = summary(content)
    assert said.startswith("Computed for links of 100mbit, not measured")
    assert "would take" in said
    assert "the network laboratory needs root" in said


def test_the_picture_can_be_read(over_loopback: Path) -> None:
    width, height = png_size(over_loopback / "demo.png")
    assert 800 <= width <= 2000
    assert 500 <= height <= 1500
    assert content_of(over_loopback)["picture"] == str(over_loopback / "demo.png")


def test_the_last_lines_say_what_to_do_next(over_loopback: Path) -> None:
    said = next_steps()
    assert "sieve = gradsieve.attach(model, optimizer=optimizer)" in said
    root = Path(__file__).parents[2]
    for page in ("optimizers.md", "ddp.md", "frontends.md", "network-lab.md"):
        assert page in said
        assert (root / "docs" / page).exists()


def test_on_a_network_time_and_bytes_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    networks.require_networks()
    monkeypatch.setattr("gradsieve.lab.bench.demo.NETWORK_NAME", networks.unique_name())
    before = networks.namespaces()
    assert main([*SHORT, "--rate", "1gbit", "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    content = json.loads(captured.out)
    assert content == content_of(tmp_path)
    assert content["demo"]["is_measured"] is True
    assert content["demo"]["obstacle"] is None
    dense = content["results"][0]
    assert dense["loopback_seconds_per_step"] is None
    # The interface counts headers too; a link cannot deliver faster than its rate.
    assert STEPS * DENSE_BYTES < dense["bytes_received"] < 1.2 * STEPS * DENSE_BYTES
    assert dense["seconds"] > 0.9 * 8 * STEPS * DENSE_BYTES / 1e9
    assert summary(content).startswith("Measured just now on links of 1gbit")
    assert png_size(tmp_path / "demo.png")[0] > 800
    assert networks.namespaces() <= before


def test_an_obstacle_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsieve.lab.bench.site.Network.__enter__", refuse)
    assert obstacle() == "the network laboratory needs root"


def test_the_run_with_the_least_time_trains_next() -> None:
    class Timed:
        def __init__(self, seconds: float) -> None:
            self.totals = type("Totals", (), {"seconds": seconds})

    fast, slow = Timed(1.0), Timed(2.0)
    assert least_time_first([slow, fast]) == [fast]  # type: ignore[list-item, comparison-overlap]


def test_a_network_has_nothing_added_to_its_times() -> None:
    result = {
        "recipe": "dense", "scores": {"accuracy": 0.9}, "train_loss": 0.1, "steps": 10, "diverged": False,
        "replicas_equal": True, "step_seconds": 2.0, "bytes_received_per_step": 1e6, "interface_bytes_per_step": 1.1e6,
    }  # fmt: skip
    faster = {**result, "step_seconds": 0.5, "interface_bytes_per_step": 1.1e5}
    results, tests = [result, *[faster] * (len(CONTESTANTS) - 1)], [[]] * len(CONTESTANTS)
    rows = standings(Demo(), results, tests)
    assert (rows[0]["seconds"], rows[0]["bytes_received"]) == (20.0, 1.1e7)
    assert (rows[1]["times_sooner"], rows[1]["times_fewer_bytes"]) == (4.0, 10.0)
    computed = standings(replace(Demo(), obstacle="no root"), results, tests)
    assert computed[0]["seconds"] == pytest.approx(10 * (2.0 + 0.08))


def test_a_demo_without_an_exchange_is_refused() -> None:
    with pytest.raises(InputError, match="hosts must be at least 2"):
        Demo(hosts=1)


def test_the_space_is_entered_before_torch_is_imported() -> None:
    """Torch starts threads, and a process with threads may not enter a user namespace: plain users had no network."""
    code = """
import sys
from gradsieve.cli import demo, main
def enter_space():
    print("torch" in sys.modules, flush=True)
    sys.exit(0)
demo.enter_space = enter_space
main(["demo", "--steps", "1"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n", done.stderr
