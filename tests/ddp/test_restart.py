"""`torchrun --max-restarts`: a run whose rank is killed goes on from its checkpoint and ends as if nothing had been."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_ddp.py"


def torchrun(
    folder: Path, ranks: int, *arguments: str, restarts: int = 0
) -> tuple[list[str], subprocess.CompletedProcess]:
    """The lines ranks printed, without their launcher's words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", str(EXAMPLE)]
    command += ["--folder", str(folder), "--steps", "14", "--every", "4", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    # Not by lines: ranks may share one.
    return re.findall(r"begins at step \d+|rank \d: loss [\d.]+, parameters [0-9a-f]+", done.stdout), done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    lines, done = torchrun(folder, 2)
    assert done.returncode == 0, done.stderr
    assert lines[0] == "begins at step 0"
    assert len({line.split("parameters ")[1] for line in lines[1:]}) == 1
    return folder, sorted(lines[1:])


def test_a_killed_rank_costs_time_and_nothing_else(undisturbed: tuple[Path, list[str]], tmp_path: Path) -> None:
    lines, done = torchrun(tmp_path, 2, "--crash-at", "10", restarts=1)
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line.startswith("begins")] == ["begins at step 0", "begins at step 8"]
    assert sorted(line for line in lines if line.startswith("rank")) == undisturbed[1]


LATE = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from torchrun_ddp import dist, meet
again, last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", os.environ["RANK"] == "1"
if again and last:
    time.sleep(1)
meet()
dist.barrier()
if not again:
    os.kill(os.getpid(), signal.SIGKILL) if last else signal.pause()
print("met again", flush=True)
"""


def test_a_rank_that_is_late_is_not_looked_for_where_its_dead_forerunner_was(tmp_path: Path) -> None:
    """torchrun keeps the store of the first attempt: its addresses made restarts fail, now and then."""
    script = tmp_path / "late.py"
    script.write_text(LATE.format(folder=str(EXAMPLE.parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met again") == 2


@pytest.mark.long
def test_without_restarts_the_job_fails_and_says_why(tmp_path: Path) -> None:
    lines, done = torchrun(tmp_path, 2, "--crash-at", "5")
    assert done.returncode != 0
    assert lines == ["begins at step 0"]
    assert "SIGKILL" in done.stderr


@pytest.mark.long
def test_it_goes_on_with_more_ranks(undisturbed: tuple[Path, list[str]]) -> None:
    folder, _ = undisturbed
    lines, done = torchrun(folder, 3, "--steps", "15")
    assert done.returncode == 0, done.stderr
    assert lines[0] == "begins at step 12"
    assert len(lines) == 4
    assert len({line.split("parameters ")[1] for line in lines[1:]}) == 1
