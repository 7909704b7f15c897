"""Public names say what they do, describe every parameter, and show examples that run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import testing
from gradsieve.optim.exchange import Options

# Not part of the library, or in need of a framework.
APART = (
    "gradsieve.lab",
    "gradsieve.cli",
    "gradsieve.__main__",
    "gradsieve.front",
    "gradsieve.comm.mpi",
    "gradsieve.integrations.lightning",
    "gradsieve.integrations.transformers",
)


def public() -> dict[str, Any]:
    names = {name: getattr(gradsieve, name) for name in gradsieve.__all__ if name != "__version__"}
    return names | {name: getattr(testing, name) for name in testing.__all__}


def described() -> Iterator[tuple[str, Any]]:
    """Functions and classes, and what the classes define."""
    for name, thing in public().items():
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield name, thing
        if inspect.isclass(thing):
            for own, member in vars(thing).items():
                if not own.startswith("_") and isinstance(member, FunctionType | property | classmethod):
                    yield f"{name}.{own}", getattr(thing, own)


DESCRIBED = dict(described())
CONSTANTS = sorted(set(public()) - set(DESCRIBED))


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_public_name_has_a_summary_line(name: str) -> None:
    thing = DESCRIBED[name]
    # A method that implements a protocol is described there.
    text = inspect.getdoc(thing) if getattr(thing, "__override__", False) else thing.__doc__
    assert text, f"{name} has no docstring"
    first, *rest = inspect.cleandoc(text).splitlines()
    assert first.endswith("."), f"{name}: {first!r} must be one line that ends in a period"
    assert not rest or not rest[0], f"{name}: an empty line must follow the summary"


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_public_constant_is_described_below_its_line(name: str) -> None:
    home = import_module(f"gradsieve.{gradsieve._HOME_OF[name]}")
    texts = [text for module in (home, *submodules(home)) for text in texts_below(module, name)]
    assert texts, f"{name} has no text below its line"
    assert texts[0].strip().endswith("."), name


def submodules(package: ModuleType) -> list[ModuleType]:
    paths = getattr(package, "__path__", [])
    return [import_module(found.name) for found in walk_packages(paths, f"{package.__name__}.")]


def texts_below(module: ModuleType, name: str) -> Iterator[str]:
    body = ast.parse(inspect.getsource(module)).body
    for line, below in pairwise(body):
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if name in names and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield below.value.value


def parameters(thing: Any) -> set[str]:
    if isinstance(thing, property):
        return set()
    if inspect.isclass(thing) and not isinstance(thing.__init__, FunctionType):  # Python's own
        return set()
    return set(inspect.signature(thing).parameters) - {"self"}


def comes_from_outside(name: str) -> bool:
    """Whether it overrides a method of torch, which describes its parameters."""
    owner, _, method = name.partition(".")
    bases = inspect.getmro(public()[owner])[1:] if method else ()
    return any(method in vars(base) for base in bases if not base.__module__.startswith("gradsieve"))


def documented(text: str, *sections: str) -> set[str]:
    """The names of the entries of some sections of a Google style docstring."""
    pattern = re.compile(rf"^(?:{'|'.join(sections)}):\n((?:(?: {{4}}.*)?\n)*)", re.MULTILINE)
    found = pattern.search(inspect.cleandoc(text) + "\n")
    entries = re.findall(r"^ {4}(\S[^:]*):", found[1], re.MULTILINE) if found else []
    return {name.strip().lstrip("*") for entry in entries for name in entry.split(",")}


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_parameter_is_described(name: str) -> None:
    thing = DESCRIBED[name]
    if getattr(thing, "__override__", False) or comes_from_outside(name):
        return
    found = documented(thing.__doc__ or "", "Args", "Attributes")
    taken = parameters(thing)
    if "options" in taken and "options" not in found:
        taken = taken - {"options"} | set(Options.__annotations__)
    assert not taken - found, f"{name} does not describe {sorted(taken - found)}"
    if "torch." not in getattr(getattr(thing, "__init__", None), "__module__", ""):  # which depend on its version
        assert not found - taken, f"{name} has no parameters {sorted(found - taken)}"


def modules() -> Iterator[ModuleType]:
    root = Path(gradsieve.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(APART):
            yield import_module(name)


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for module in modules() for test in finder.find(module, globs={})]
    return sorted((test for test in tests if test.examples), key=lambda test: test.name)


EXAMPLES = examples()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What an example may use without saying so: the variables of a user's script, here on one rank."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "inputs": torch.ones(4, 64)}
    yield names
    if "sieve" in names:
        names["sieve"].close()
    dist.destroy_process_group()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.removeprefix("gradsieve."))
@pytest.mark.filterwarnings("ignore:the model's process group has one rank only")
def test_an_example_runs(example: doctest.DocTest, script: dict[str, Any]) -> None:
    lines: list[str] = []
    example.globs = script
    result = doctest.DocTestRunner(verbose=False).run(example, out=lines.append, clear_globs=False)
    assert result.failed == 0, "".join(lines)


def test_every_public_class_and_function_has_an_example() -> None:
    shown = {example.name.rpartition(".")[2] for example in EXAMPLES}
    assert {name for name in DESCRIBED if "." not in name} <= shown
