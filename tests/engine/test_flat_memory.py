"""A long run needs no more memory at its end than near its start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradsieve.lab.rank_processes import RankProcess, run_rank_processes
from gradsieve.lab.train.choice import Choice
from gradsieve.lab.train.plan import Plan
from gradsieve.lab.train.run import Run

STEPS = 10_000
LOOKED_AT_EVERY = 1000
SETTLED_AFTER = 2  # looks: allocators find their size while the first tests and regions are made
ALLOWED_BYTES = 2 << 20  # a leak of 250 bytes a step would be seen


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_over_a_run(process: RankProcess, folder: Path) -> list[int]:
    choice = Choice("oktopk", density=0.02)
    plan = Plan("resnet20", choice, steps=STEPS, batch=2, train_samples=256, test_samples=32, log_every=50)
    run = Run(plan, plan.open(), folder, lambda row: None)
    run.begin()
    seen = []
    while not run.done:
        run.advance()
        if run.replica.step % LOOKED_AT_EVERY == 0:
            seen.append(resident_bytes())
    assert run.end()["replicas_equal"]
    return seen


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_ten_thousand_steps_run_in_flat_memory(tmp_path: Path) -> None:
    for rank, seen in enumerate(run_rank_processes(2, memory_over_a_run, tmp_path)):
        assert len(seen) == STEPS // LOOKED_AT_EVERY
        grown = max(seen[SETTLED_AFTER:]) - seen[SETTLED_AFTER]
        assert grown < ALLOWED_BYTES, f"rank {rank}: {[f'{each / 1e6:.1f} MB' for each in seen]}"
