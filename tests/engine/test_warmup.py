"""Kernels are compiled when a sieve is attached, not in the first step."""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve.comm import Comm
from gradsieve.engine import Settings, warmup
from gradsieve.engine.groups import Group, Slot
from gradsieve.engine.schedules import Constant
from gradsieve.engine.warmup import rehearse_gradients, warm_up
from gradsieve.recipes import Recipe, recipe
from gradsieve.reducers.topka import TopkA
from gradsieve.selectors.exact import Exact

COMPILED_LATE = """
import json, sys, torch
from numba.core.dispatcher import Dispatcher
from gradsieve.comm import CountingComm
from gradsieve.engine import Engine, Settings, Step
from gradsieve.engine.groups import Group, Slot
from gradsieve.engine.schedules import Constant
from gradsieve.engine.warmup import rehearse_gradients, warm_up
from gradsieve.recipes import RECIPES
from gradsieve.testing import run_ranks
from gradsieve.updates import for_updates
from gradsieve.updates.warmup import rehearse_updates

names = []
compile_ = Dispatcher.compile
def seen(self, signature):
    if self.py_func.__module__.startswith("gradsieve"):
        names.append(self.py_func.__name__)
    return compile_(self, signature)
Dispatcher.compile = seen

def large(groups, settings, kind):
    def rank(comm):
        if kind is rehearse_updates:
            return rehearse_updates(comm, groups, settings)
        engine = Engine(groups, settings, CountingComm(comm))
        for number in range(3):
            step = Step(engine)
            step.deliver("weight", torch.randn(groups[0].numel, generator=torch.Generator().manual_seed(number)))
            for index in step.ready():
                step.exchange(index)
            step.finish()
    import gradsieve.engine.warmup as warmup
    warmup.NUMEL = groups[0].numel
    run_ranks(3, rank)

late = {}
for name, row in RECIPES.items():
    for kind in (rehearse_gradients, rehearse_updates):
        if kind is rehearse_updates and name == "dgc":
            continue  # holds the optimizer's momentum
        settings = Settings(row(), Constant(0.01))
        settings = for_updates(settings) if kind is rehearse_updates else settings
        group = Group((Slot("weight", 0, 50_000),), torch.float32, torch.device("cpu"), True)
        warm_up([group], settings, kind)
        before = len(names)
        large((group,), settings, kind)
        late[f"{name} {kind.__name__}"] = names[before:]
print(json.dumps({"late": late, "in_all": len(names)}))
"""


def group(dtype: torch.dtype = torch.float32, device: str = "cpu", sparse: bool = True) -> Group:
    return Group((Slot("weight", 0, 100),), dtype, torch.device(device), sparse)


def settings(made: Recipe | None = None) -> Settings:
    return Settings(made or recipe("topka"), Constant(0.1))


@pytest.fixture(autouse=True)
def nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_done", set())


class Calls:
    """A rehearsal that only counts."""

    def __init__(self) -> None:
        self.groups: list[tuple[Group, ...]] = []

    def __call__(self, comm: Comm, groups: tuple[Group, ...], settings: Settings) -> None:
        if comm.rank == 0:
            self.groups.append(groups)


def test_no_step_compiles_a_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_LATE], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["in_all"] > 10, "the warm-up compiles or reads kernels"
    assert not {name: kernels for name, kernels in found["late"].items() if kernels}


def test_each_recipe_and_dtype_once_per_process() -> None:
    calls = Calls()
    for _ in range(3):
        warm_up([group(), group(), group(torch.float64)], settings(), calls)
    assert sorted(str(groups[0].dtype) for groups in calls.groups) == ["torch.float32", "torch.float64"]
    warm_up([group()], settings(recipe("oktopk")), calls)
    assert len(calls.groups) == 3


def test_only_what_is_sent_sparsely_from_main_memory() -> None:
    calls = Calls()
    warm_up([group(sparse=False), group(device="meta")], settings(), calls)
    assert not calls.groups


class OwnSelector(Exact):
    """A part of the user's own, which must not be called before its first step."""


def test_parts_of_the_users_own_are_not_called() -> None:
    calls = Calls()
    warm_up([group()], settings(Recipe(OwnSelector(), TopkA())), calls)
    assert not calls.groups


def test_the_users_random_numbers_stay() -> None:
    before = torch.get_rng_state()
    warm_up([group()], settings(), rehearse_gradients)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_is_left_to_the_first_step() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    warm_up([group()], settings(), fails)


@pytest.mark.parametrize("slow", [True, False])
def test_one_line_if_it_takes_long(
    slow: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "TOLD_AFTER_SECONDS", 0.0 if slow else 3600.0)
    told = threading.Event()
    monkeypatch.setattr(warmup._log, "warning", lambda text: (logging.getLogger("test").warning(text), told.set()))

    def takes_a_while(comm: Comm, groups: tuple[Group, ...], settings: Settings) -> None:
        if slow:
            assert told.wait(60)

    warm_up([group()], settings(), takes_a_while)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == slow
    assert all("compiling kernels for this machine" in line for line in lines)


def test_others_wait_for_the_process_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup.tempfile, "gettempdir", lambda: str(tmp_path))
    calls = Calls()
    descriptor = warmup._lock_file()  # as another process has it: locks belong to open files
    assert descriptor is not None
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = threading.Thread(target=warm_up, args=([group()], settings(), calls), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert not calls.groups
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    waiting.join(60)
    assert len(calls.groups) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    calls = Calls()
    warm_up([group()], settings(), calls)
    assert len(calls.groups) == 1
