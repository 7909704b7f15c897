"""The examples run on two ranks under torchrun, exchange through the hook, and resume exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.torchrun import ROOT, launch


def check(results: list[dict[str, Any]], steps: int, below: float) -> None:
    for result in results:
        assert result["sieve_steps"] == steps
        assert result["bytes_sent"] > 0
        assert result["loss"] < below


def test_ddp() -> None:
    check(launch("examples/ddp.py"), 59, below=3.5)  # the last step would be exchanged by the next forward pass


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_lightning_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is in the extra frontends")
    whole = launch("examples/lightning_trainer.py", "--folder", str(tmp_path))
    check(whole, 59, below=3.5)
    resumed = launch("examples/lightning_trainer.py", "--resume-from", str(tmp_path / "epoch=0.ckpt"))
    check(resumed, 30, below=3.5)
    assert resumed[0]["parameters"] == whole[0]["parameters"]


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_accelerate_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is in the extra frontends")
    whole = launch("examples/accelerate_loop.py", "--folder", str(tmp_path))
    check(whole, 59, below=3.5)
    resumed = launch("examples/accelerate_loop.py", "--folder", str(tmp_path), "--resume-at", "40")
    check(resumed, 20, below=3.5)
    assert resumed[0]["parameters"] == whole[0]["parameters"]


@pytest.mark.long  # two launches of a framework each
@pytest.mark.timeout(900)
def test_hf_trainer_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is in the extra frontends")
    pytest.importorskip("accelerate", reason="the Trainer needs Accelerate")
    whole = launch("examples/hf_trainer.py", "--folder", str(tmp_path))
    check(whole, 59, below=4.5)
    resumed = launch(
        "examples/hf_trainer.py", "--folder", str(tmp_path), "--resume-from", str(tmp_path / "checkpoint-40")
    )
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
