"""`gradsieve data`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradsieve.cli import main
from gradsieve.lab.data.sources import SOURCES


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sources_are_listed_with_their_state(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["cache"] == str(own_cache)
    assert [row["name"] for row in listed["sources"]] == list(SOURCES)
    assert {row["name"]: row["state"] for row in listed["sources"]}["cifar10"] == "to be fetched"
    (own_cache / "cifar10").mkdir(parents=True)
    assert main(["data", "list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "cifar10" in line)
    assert "ready" in line


def test_every_source_of_a_workload_is_listed() -> None:
    from gradsieve.lab.workloads import WORKLOADS

    assert {source for workload in WORKLOADS.values() for source in workload.sources} == set(SOURCES)


def test_listing_needs_no_torch() -> None:
    script = "import sys; from gradsieve.cli import main; main(['data', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get", "cifar"], "unknown source of data 'cifar'; did you mean 'cifar10'?"),
        (["get", "an4"], "an4 cannot be fetched; how to get it: --data FOLDER"),
        (["get", "cifar10", "--archive", "nowhere.tar.gz"], "there is no file or folder nowhere.tar.gz"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    assert main(["data", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"gradsieve: error: {sentence}")
    assert "Traceback" not in captured.err
    assert not (own_cache / "cifar10").exists()
