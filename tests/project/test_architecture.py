"""The house rules that a reader relies on: one direction of imports, registries that name every module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradsieve
from gradsieve import RECIPES, REDUCERS, SELECTORS
from gradsieve.selectors import Everything

ROOT = Path(gradsieve.__file__).parent
FLOORS = [
    {"errors", "version"},
    {"registry"},
    {"kernels"},
    {"vector", "comm"},
    {"wire"},
    {"selectors", "reducers", "feedback"},
    {"recipes", "testing"},
    {"pipeline", "stats"},
    {"functional"},
    {"auto"},
    {"engine"},
    {"checkpoint"},
    {"sieve", "dcp"},
    {"updates"},
    {"optim"},
    {"ddp"},
    {"integrations"},
    {"front"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
# Each front end may import its own framework, and is imported only by those who use it.
FRAMEWORKS = {
    "integrations/lightning.py": {"lightning", "pytorch_lightning"},
    "integrations/transformers.py": {"transformers"},
}
LIBRARY = {"torch", "typing_extensions", "numpy", "numba", "llvmlite", "mpi4py", "gradsieve"}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = part_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "gradsieve" and len(parts) > 1 and parts[1] != own:
            assert FLOOR[parts[1]] < FLOOR[own], f"{own} must not import {parts[1]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_needs_torch_numpy_and_numba_only(path: Path) -> None:
    import sys

    if part_of(path) in ("lab", "cli"):
        return
    foreign = {name.split(".")[0] for name in imported(path)} - LIBRARY - sys.stdlib_module_names
    foreign -= FRAMEWORKS.get(path.relative_to(ROOT).as_posix(), set())
    assert not foreign


def files(folder: str, *helpers: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "protocol", *helpers}


def test_every_algorithm_is_one_file_and_one_registry_line() -> None:
    assert set(SELECTORS) == files("selectors", "search", "everything")
    assert set(REDUCERS) == files("reducers", "quantiles", "cost")


@pytest.mark.parametrize("registry", [SELECTORS, REDUCERS], ids=lambda registry: registry.kind)
def test_every_entry_has_defaults_and_says_what_it_is(registry: dict[str, type]) -> None:
    for entry in registry.values():
        entry()
        assert entry.__doc__


def test_every_recipe_is_made_of_registered_parts_and_says_what_it_is() -> None:
    selectors, reducers = {*SELECTORS.values(), Everything}, set(REDUCERS.values())
    for row in RECIPES.values():
        assert type(row().selector) in selectors
        assert type(row().reducer) in reducers
        assert row.description.endswith(".")


@pytest.mark.parametrize("name", sorted(set(gradsieve.__all__) - {"__version__"}))
def test_public_names_have_docstrings(name: str) -> None:
    """Their public methods and properties too, if need be their base class's: the linter does not ask for these."""
    entry = getattr(gradsieve, name)
    assert inspect.getdoc(entry)
    for attribute, member in vars(entry).items() if isinstance(entry, type) else ():
        if not attribute.startswith("_") and isinstance(member, (type(part_of), property, classmethod, staticmethod)):
            assert inspect.getdoc(getattr(entry, attribute)), f"{name}.{attribute}"


def test_files_stay_short() -> None:
    long = [str(path) for path in MODULES if len(path.read_text().splitlines()) > 300]
    assert not long


def module_name(path: Path) -> str:
    return ".".join(("gradsieve", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def run_at_import(tree: ast.Module) -> Iterator[ast.ImportFrom | ast.Import]:
    """Not those in functions, which run later, and not those for type checkers."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield node
        elif not isinstance(node, ast.FunctionDef) and not (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            waiting.extend(ast.iter_child_nodes(node))


def needed(path: Path, names: set[str]) -> set[str]:
    """The modules whose names this module needs while it is imported."""
    found = set()
    for node in run_at_import(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            found.update(
                full if (full := f"{node.module}.{alias.name}") in names else node.module for alias in node.names
            )
    return found & names - {module_name(path)}


def test_no_imports_in_circles() -> None:
    names = {module_name(path) for path in MODULES}
    graph = {module_name(path): needed(path, names) for path in MODULES}
    assert graph["gradsieve.pipeline"] >= {"gradsieve.recipes", "gradsieve.vector.pieces"}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle
