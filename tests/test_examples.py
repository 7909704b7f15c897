"""The examples run on two ranks under torchrun, exchange through the hook, and resume exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def launch(example: str, *options: str) -> list[dict[str, Any]]:
    """What both ranks printed last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "examples" / example), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    decoder, text, results = json.JSONDecoder(), done.stdout, []
    while (start := text.find('{"rank"')) >= 0:  # ranks may share a line
        result, end = decoder.raw_decode(text[start:])
        results.append(result)
        text = text[start + end :]
    results.sort(key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == [0, 1]
    assert results[0]["parameters"] == results[1]["parameters"]
    return results


def check(results: list[dict[str, Any]], steps: int, below: float) -> None:
    for result in results:
        assert result["sieve_steps"] == steps
        assert result["bytes_sent"] > 0
        assert result["loss"] < below


def test_ddp() -> None:
    check(launch("ddp.py"), 59, below=3.5)  # the last step would be exchanged by the next forward pass


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_lightning_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is in the extra frontends")
    whole = launch("lightning_trainer.py", "--folder", str(tmp_path))
    check(whole, 59, below=3.5)
    resumed = launch("lightning_trainer.py", "--resume-from", str(tmp_path / "epoch=0.ckpt"))
    check(resumed, 30, below=3.5)
    assert resumed[0]["parameters"] == whole[0]["parameters"]


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_accelerate_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is in the extra frontends")
    whole = launch("accelerate_loop.py", "--folder", str(tmp_path))
    check(whole, 59, below=3.5)
    resumed = launch("accelerate_loop.py", "--folder", str(tmp_path), "--resume-at", "40")
    check(resumed, 20, below=3.5)
    assert resumed[0]["parameters"] == whole[0]["parameters"]


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_hf_trainer_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is in the extra frontends")
    pytest.importorskip("accelerate", reason="the Trainer needs Accelerate")
    whole = launch("hf_trainer.py", "--folder", str(tmp_path))
    check(whole, 59, below=4.5)
    resumed = launch("hf_trainer.py", "--folder", str(tmp_path), "--resume-from", str(tmp_path / "checkpoint-40"))
    check(resumed, 20, below=4.5)
    assert resumed[0]["parameters"] == whole[0]["parameters"]


def test_an_algorithm_of_ones_own_keeps_the_laws_and_trains() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "new_reducer.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "keeps the laws" in done.stdout
    assert float(done.stdout.split("-> ")[1].split()[0]) < 1e-3
    assert len((ROOT / "examples" / "new_reducer.py").read_text().splitlines()) < 80
