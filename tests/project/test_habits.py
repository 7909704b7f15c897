"""What contributors rely on: versions that agree, a Makefile that finds Python, pages whose links and code work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gradsieve import REDUCERS, __version__
from gradsieve.reducers.protocol import Reducer
from gradsieve.testing import check_reducer

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()
PYTHONS = ("python3.13", "python3.12", "python3.11", "python3", "python")
PAGES = ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"]
YAML_FILES = [
    "CITATION.cff",
    ".pre-commit-config.yaml",
    ".github/workflows/test.yml",
    ".github/ISSUE_TEMPLATE/bug.yml",
    ".github/ISSUE_TEMPLATE/config.yml",
    ".github/ISSUE_TEMPLATE/feature.yml",
]


def matrix(name: str) -> list[str]:
    """A list of the workflow's matrix."""
    found = re.search(rf"^ +{name}: \[(.*)\]", WORKFLOW, re.MULTILINE)
    assert found, f"the matrix has no line for {name}"
    return re.findall(r'"([^"]+)"', found[1])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def minimum(package: str) -> str:
    """The lowest version of a dependency that pyproject.toml declares."""
    (found,) = (spec for spec in PROJECT["dependencies"] if spec.startswith(f"{package}>="))
    return str(found).removeprefix(f"{package}>=")


def fields(citation: str) -> dict[str, str]:
    """The plain fields at the top level of a CITATION.cff."""
    return {key: value.strip('"') for key, value in re.findall(r"^([a-z-]+): (.+)$", citation, re.MULTILINE)}


def test_the_citation_names_this_version_and_the_papers() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    found = fields(citation)
    assert found["version"] == __version__
    assert found["license"] == PROJECT["license"]
    assert found["repository-code"] == PROJECT["urls"]["Repository"]
    for paper in ("10.1145/3503221.3508399", "arXiv:1911.08772", "arXiv:1901.04359"):
        assert paper in citation


@pytest.mark.parametrize("name", YAML_FILES)
def test_yaml_files_can_be_read(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra frontends")
    content = yaml.safe_load((ROOT / name).read_text())
    required = {
        "CITATION.cff": {"cff-version", "message", "title", "authors"},
        ".pre-commit-config.yaml": {"repos"},
        ".github/workflows/test.yml": {"jobs", "permissions"},
        ".github/ISSUE_TEMPLATE/config.yml": {"contact_links"},
    }
    assert required.get(name, {"name", "description", "body"}) <= content.keys()


def test_every_issue_form_is_checked_above() -> None:
    listed = {ROOT / name for name in YAML_FILES if "ISSUE_TEMPLATE" in name}
    assert set((ROOT / ".github/ISSUE_TEMPLATE").iterdir()) == listed


def test_the_workflow_runs_the_oldest_versions_that_are_declared() -> None:
    pythons, torches = matrix("python"), matrix("torch")
    assert f">={min(pythons, key=numbers)}" == PROJECT["requires-python"]
    oldest, newest = min(torches, key=numbers), max(torches, key=numbers)
    declared = numbers(minimum("torch"))
    assert numbers(oldest)[: len(declared)] == declared
    assert numbers(newest) > numbers(oldest)


def test_the_makefile_installs_a_torch_that_is_allowed() -> None:
    pinned = re.search(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned
    assert numbers(pinned[1]) >= numbers(minimum("torch"))


def test_contributing_says_which_versions_were_run() -> None:
    (lowest,) = re.findall(r"^\| lowest declared \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    run = [numbers(re.match(r"[\d.]+", cell.strip())[0]) for cell in lowest.split("|")]  # type: ignore[index]
    declared = [PROJECT["requires-python"].removeprefix(">="), *map(minimum, ("torch", "numpy", "numba"))]
    for version, least in zip(run, map(numbers, declared), strict=True):
        assert version[: len(least)] == least


def test_the_project_has_urls() -> None:
    urls = PROJECT["urls"]
    assert set(urls) >= {"Repository", "Issues", "Documentation", "Changelog"}
    repository = urls["Repository"]
    assert all(url.startswith(repository) for url in urls.values())
    for url in urls.values():  # what a link names exists in the repository
        if found := re.fullmatch(r"/(?:tree|blob)/main/(.+)", url.removeprefix(repository)):
            assert (ROOT / found[1]).exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.strip()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if target.startswith("http"):
            assert target.startswith(PROJECT["urls"]["Repository"])
        else:
            assert (ROOT / target).exists(), f"{page} links {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"])
def test_files_that_pages_name_exist(page: str) -> None:
    for name in re.findall(r"`((?:tests|docs|benchmarks|src|\.github)/[\w./-]+)`", (ROOT / page).read_text()):
        if "NAME" not in name:
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_hooks_run_the_checks_of_make() -> None:
    """A commit that the hooks let pass is not refused by `make lint` or `make types`."""
    makefile, hooks = (ROOT / "Makefile").read_text(), (ROOT / ".pre-commit-config.yaml").read_text()
    recipes = re.findall(r"^(?:lint|types): .*\n\t(.+)$", makefile, re.MULTILINE)
    commands = [command.strip().replace("$(BIN)", ".venv/bin") for recipe in recipes for command in recipe.split("&&")]
    assert len(commands) == 3
    assert re.findall(r"^ +entry: (.+)$", hooks, re.MULTILINE) == commands


# The Makefile's search. A fake is a script that runs the Makefile's own check in this Python under another version.


def fake(folder: Path, name: str, version: tuple[int, int]) -> None:
    pretend = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; exec(sys.argv[1])"
    script(folder, name, f'shift; exec {sys.executable} -c "{pretend}" "$@"')


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make where nothing but the folder is on the path."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make")
    kept = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS|PYTHON$|VENV", name)}
    return subprocess.run(
        [program, "-s", "--no-print-directory", "-C", str(ROOT), *arguments],
        env={**kept, "PATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", PYTHONS)
def test_make_finds_a_good_python_under_any_of_its_names(name: str, tmp_path: Path) -> None:
    fake(tmp_path, name, (3, 11))
    done = make(tmp_path, "python")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}\n", "")


def test_make_passes_over_old_and_broken_pythons(tmp_path: Path) -> None:
    """A shim of pyenv exists for each version that is installed, and fails for those that are not active."""
    script(tmp_path, "python3.13", "echo 'command not found' >&2; exit 127")
    fake(tmp_path, "python3.12", (3, 9))
    fake(tmp_path, "python3.11", (3, 10))
    fake(tmp_path, "python3", (3, 14))
    fake(tmp_path, "python", (3, 12))
    assert make(tmp_path, "python").stdout == "python3\n"


def test_make_takes_the_first_good_python(tmp_path: Path) -> None:
    for name in PYTHONS:
        fake(tmp_path, name, (3, 12))
    assert make(tmp_path, "python").stdout == "python3.13\n"


@pytest.mark.parametrize("old", [(), ("python3", "python")], ids=["none", "only old ones"])
@pytest.mark.parametrize("target", ["python", "setup"])
def test_make_refuses_in_one_sentence_without_a_good_python(target: str, old: tuple[str, ...], tmp_path: Path) -> None:
    for name in old:
        fake(tmp_path, name, (3, 10))
    environment = tmp_path / "environment"
    done = make(tmp_path, target if target == "python" else f"{environment}/.ready", f"VENV={environment}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not environment.exists()


def test_python_can_be_named_and_is_checked(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    fake(folder, "python3", (3, 12))
    fake(elsewhere, "good", (3, 11))
    fake(elsewhere, "old", (3, 10))
    assert make(folder, "python", f"PYTHON={elsewhere}/good").stdout == f"{elsewhere}/good\n"
    assert make(folder, "python", PYTHON=f"{elsewhere}/good").stdout == f"{elsewhere}/good\n"
    refused = make(folder, "python", f"PYTHON={elsewhere}/old")
    assert refused.returncode != 0
    assert f"PYTHON={elsewhere}/old is not one" in refused.stderr


def test_the_makefile_wants_the_python_that_the_package_wants() -> None:
    wanted = ", ".join(PROJECT["requires-python"].removeprefix(">=").split("."))
    assert f"sys.version_info < ({wanted})" in (ROOT / "Makefile").read_text()


# The example of CONTRIBUTING.md obeys the law that the page states.


def example_reducer() -> type[Reducer[Any]]:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(example, "CONTRIBUTING.md", "exec"), names)
    (found,) = (value for value in names.values() if getattr(value, "__module__", "") == "contributing")
    assert found not in REDUCERS.values()
    return found  # type: ignore[no-any-return]


def test_the_reducer_of_the_page_keeps_the_laws() -> None:
    check_reducer(example_reducer(), sizes=[1, 2, 5])
