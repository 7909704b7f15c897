"""README and docs: whole Python examples run, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gradsieve.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


WHOLE = [
    pytest.param(text, id=f"{name}: {text.strip().splitlines()[-1]}")
    for page, name in zip(PAGES, PAGE_IDS, strict=True)
    for text in blocks(page, "python")
    if text.startswith("import torch\n") and "print(" in text
]


def test_there_are_examples() -> None:
    assert len(WHOLE) >= 2


@pytest.mark.parametrize("example", WHOLE)
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "page", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page that begin with `gradsieve`, in words."""
    text = "\n".join(blocks(page, "") + blocks(page, "bash")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("gradsieve ")]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page):
        command: click.Command = app
        rest = words[1:]
        while isinstance(command, click.Group) and rest:
            assert rest[0] in command.commands, f"{' '.join(words)}: there is no command {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        own = rest[: rest.index("--")] if "--" in rest else rest
        for option in (word.partition("=")[0] for word in own if word.startswith("--")):
            assert option in known | {"--help"}, f"{' '.join(words)}: there is no option {option}"
