"""The command line: what it prints where, and that every mistake is one sentence."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import click
import pytest

from gradsieve import RECIPES, REDUCERS, SELECTORS, __version__
from gradsieve.cli import main
from gradsieve.cli.app import app


def test_no_torch_for_help_version_and_argument_errors() -> None:
    calls = {
        "--help": 0,
        "--version": 0,
        "bench select --help": 0,
        "demo --help": 0,
        "bench reduce --density 1.5": 2,
        "bench select --colour red": 2,
        "demo --steps 0": 2,
        "train": 2,
        "train --help": 0,
        "compare resnet20 --seeds 0": 2,
        "bench train resnet20 --lr 0": 2,
        "lab --help": 0,
        "lab up --rate quick": 2,
    }
    script = (
        "import sys; from gradsieve.cli import main\n"
        f"codes = [main(call.split()) for call in {list(calls)!r}]\n"
        "print(codes, sorted({'torch', 'numba', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"{list(calls.values())} []"


def commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


@pytest.mark.parametrize(
    "command", list(commands(app)), ids=lambda command: command.callback.__module__ + "." + command.name
)
def test_every_command_parses_into_one_frozen_dataclass_and_explains_its_options(command: click.Command) -> None:
    assert command.callback is not None
    options = get_type_hints(inspect.unwrap(command.callback))["options"]
    assert options.__dataclass_params__.frozen
    assert {field.name for field in dataclasses.fields(options)} == {parameter.name for parameter in command.params}
    assert command.get_short_help_str(limit=64)[-3:] != "..."
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("nosuch", 2)])
def test_the_package_is_the_command(argument: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "gradsieve", argument], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "gradsieve" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_asked_for_gives_help(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    captured = capsys.readouterr()
    assert "Usage: gradsieve" in captured.out + captured.err


@pytest.mark.parametrize(
    ("missing", "needed_for"), [("click", ["gradsieve.cli.app", "click"]), ("rich", ["rich.console"])]
)
def test_without_the_lab_extra_one_sentence_says_what_to_install(
    missing: str, needed_for: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in needed_for:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, needed_for[-1], None)
    assert main(["list"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"needs {missing}" in captured.err
    assert "gradsieve[lab]" in captured.err


def test_list_has_every_registered_name_with_description_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for kind, registry in (("recipes", RECIPES), ("selectors", SELECTORS), ("reducers", REDUCERS)):
        assert [entry["name"] for entry in listed[kind]] == list(registry)
        assert all(entry["description"] for entry in listed[kind])
    by_name = {entry["name"]: entry for entry in listed["recipes"]}
    assert by_name["oktopk"]["settings"]["selector"] == "threshold"
    assert by_name["oktopk"]["settings"]["reducer"] == "oktopk"
    assert {e["name"] for e in listed["reducers"] if not e["conserving"]} == {"gtopk_paper"}
    assert next(e for e in listed["selectors"] if e["name"] == "threshold")["settings"]["period"] == 32


def test_list_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for registry in (RECIPES, SELECTORS, REDUCERS) for name in registry)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "select", "--density", "1.5"], "density must be in (0, 1], got 1.5"),
        (["bench", "reduce", "--density", "0.1", "0"], "density must be in (0, 1], got 0"),
        (["bench", "reduce", "--density", "nan"], "density must be in (0, 1], got nan"),
        (["bench", "reduce", "--density", "much"], "density must be in (0, 1], got much"),
        (["bench", "reduce", "--ranks", "0"], "ranks must be at least 1, got 0"),
        (["bench", "select", "--numel", "0"], "numel must be at least 1, got 0"),
        (["bench", "select", "--numel", "1.5"], "numel must be a whole number, got '1.5'"),
        (["bench", "select", "--numel", "inf"], "numel must be a whole number, got 'inf'"),
        (["bench", "select", "--numel", "9e15"], "GB of memory"),
        (["bench", "select", "--threads", "-1"], "threads must be at least 1, got -1"),
        (["bench", "select", "--repeats", "0"], "repeats must be at least 1, got 0"),
        (["bench", "select", "--method", "exakt"], "unknown selector 'exakt'; did you mean 'exact'?"),
        (["bench", "reduce", "--recipe", "oktop"], "unknown recipe 'oktop'; did you mean 'oktopk'?"),
        (["bench", "reduce", "--ranks"], "Option '--ranks' requires an argument."),
        (["demo", "--hosts", "1"], "hosts must be at least 2, or there is nothing to exchange, got 1"),
        (["demo", "--workers", "65"], "hosts must be between 1 and 64, got 65"),
        (["demo", "--rate", "quick"], "a rate must be unlimited or between 100kbit and 100gbit"),
        (["demo", "--rate", "unlimited"], "the rate must be limited, such as 100mbit"),
        (["bench", "wire", "--ranks", "1"], "ranks must be at least 2, or nothing is sent, got 1"),
        (["demo", "--workers", "two"], "hosts must be a whole number, got 'two'"),
        (["demo", "--steps", "0"], "steps must be at least 1, got 0"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["demo", "--out", "/dev/null/here"], "cannot write to /dev/null/here"),
        (["fly"], "No such command 'fly'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradsieve: error: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def group_ends(group: int) -> bool:
    """Python's own helper process notices its parent's end a moment later."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("delay_seconds", [0.0, 0.2, 6.0], ids=["at once", "while workers start", "while they work"])
def test_interrupt_ends_workers_quietly(tmp_path: Path, delay_seconds: float) -> None:
    """Also while the workers are being started, when an interrupt that is only ignored would be lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or a background run of the tests hands down "ignored"
    command = [sys.executable, "-m", "gradsieve.cli", "demo", "--loopback", "--hosts", "2", "--steps", "9000"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert "No network: --loopback was given" in process.stderr.readline()
    assert "Starting rank processes" in process.stderr.readline()
    time.sleep(delay_seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert group_ends(process.pid)


LEAVING = """
import atexit, sys
import gradsieve.cli, gradsieve.lab.train.world as world

class Loud:
    def __del__(self):
        print("taken apart")

kept = Loud()
atexit.register(print, "at exit")
world.was_joined = bool(int(sys.argv[1]))
sys.argv[1:] = ["list", "--nonsense"]
sys.exit(gradsieve.cli.main())
"""


@pytest.mark.parametrize("was_joined", [True, False])
def test_a_rank_of_a_launcher_ends_before_the_interpreter_is_taken_apart(was_joined: bool) -> None:
    """Gloo's threads abort a process whose interpreter is gone: exit code -6 after all work was done, seen once."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(int(was_joined))], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "no such option" in done.stderr.lower()
    assert done.stdout.splitlines() == (["at exit"] if was_joined else ["at exit", "taken apart"])
