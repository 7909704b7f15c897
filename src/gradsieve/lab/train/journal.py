"""The files of a run: config.json, environment.json, metrics.jsonl, probe.jsonl, result.json. Rank 0 writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.report import environment
from gradsieve.lab.train.plan import Plan

Row = dict[str, Any]
METRICS, PROBE, RESULT = "metrics.jsonl", "probe.jsonl", "result.json"


def make_folder(folder: Path) -> Path:
    """Create the folder before anything is computed: a run whose result cannot be written must not start."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a run: its config.json cannot be read ({error})") from None
    return config


def read_result(folder: Path) -> Row:
    """The result.json of a finished run."""
    result: Row = json.loads((folder / RESULT).read_text())
    return result


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSON lines file, without an incomplete last line after a crash."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class Journal:
    """Writes the files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, plan: Plan, facts: Row) -> None:
        """Start a new run: remove the rows of an earlier one."""
        self._write("config.json", {"plan": plan.to_json(), **facts})
        self._write("environment.json", environment())
        for name in (METRICS, PROBE, RESULT):
            (self.folder / name).unlink(missing_ok=True)

    def go_on(self, plan: Plan, facts: Row, step: int) -> None:
        """Resume after this step: remove the rows of later steps, which will be repeated."""
        self._write("config.json", {"plan": plan.to_json(), **facts})
        for name in (METRICS, PROBE):
            path = self.folder / name
            kept = [row for row in read_rows(path) if row["step"] <= step]
            if path.exists():
                path.write_text("".join(_line(row) for row in kept))

    def add(self, row: Row, name: str = METRICS) -> None:
        """Append one line to a file, immediately."""
        with (self.folder / name).open("a") as file:
            file.write(_line(row))

    def end(self, result: Row) -> None:
        self._write(RESULT, result)

    def _write(self, name: str, content: Row) -> None:
        (self.folder / name).write_text(json.dumps(finite(content), indent=1) + "\n")


def finite(value: Any) -> Any:
    """The value with NaN and infinities replaced by None: JSON has no numbers for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _line(row: Row) -> str:
    return json.dumps(finite(row)) + "\n"
