"""Coverage-guided fuzzing of messages, in a process of its own: the fuzzer never returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).with_name("fuzz_wire.py")


def fuzz(runs: int) -> str:
    command = [sys.executable, str(FUZZER), f"-runs={runs}", "-seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_no_input_crashes_the_reader() -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux only")
    assert "Done 10000 runs" in fuzz(10_000)


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_no_input_of_very_many_crashes_the_reader() -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux only")
    assert "Done 1000000 runs" in fuzz(1_000_000)
