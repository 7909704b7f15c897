"""The probe watches a run and leaves its figures as they are without it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from gradsieve import Constant, CountingComm, Rules, Stats
from gradsieve.comm import Comm
from gradsieve.engine import Engine, Settings, Step
from gradsieve.engine.groups import cut_into_groups
from gradsieve.lab.train import probe as probing
from gradsieve.recipes import recipe
from gradsieve.testing import run_ranks

PAUSE = 0.15


def run_two_steps(comm: Comm, name: str, probe: probing.Probe | None) -> Stats:
    made = recipe(name)
    chosen = made if probe is None else probing.probed(made, probe)
    groups = cut_into_groups({"weight": torch.empty(60, 70)}, Rules(), None)
    engine = Engine(groups, Settings(chosen, Constant(0.05)), CountingComm(comm))
    for number in range(2):
        if probe is not None:
            probe.begin(number, wanted=True)
        step = Step(engine)
        step.deliver("weight", torch.randn(4200, generator=torch.Generator().manual_seed(10 * number + comm.rank)))
        for index in step.ready():
            step.exchange(index)
        step.finish()
    return engine.stats


@pytest.mark.parametrize("name", ["oktopk", "topka", "dgc"])
def test_the_probe_leaves_traffic_and_phases_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its all_reduce calls were counted once, its time was booked as reducing, and coding was, too."""
    sample = probing.take_sample

    def slow(*arguments: Any) -> probing.Sample:
        time.sleep(PAUSE)
        return sample(*arguments)

    monkeypatch.setattr(probing, "take_sample", slow)

    def rank(comm: Comm) -> tuple[Stats, Stats, list[dict[str, Any]]]:
        probe = probing.Probe()
        return run_two_steps(comm, name, None), run_two_steps(comm, name, probe), probe.taken()

    for plain, probed, rows in run_ranks(3, rank):
        assert [row["step"] for row in rows] == [1, 2]
        assert probed.traffic == plain.traffic
        assert probed.seconds.total < plain.seconds.total + PAUSE  # two pauses are in no phase
        assert probed.seconds.encode > 0
        assert probed.seconds.decode > 0
