"""Test loss against bytes and against seconds, from results of `bench train`: which method is best at equal cost?

Baselines are dense DDP, torch's hooks and dense averaging of models. The other rows are this library's recipes. The
margin of a recipe is how much higher the loss is of the best baseline that sends no more bytes, or takes no more
seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.report import Column, Report, Row, thousands, times
from gradsieve.lab.train.variants import UPDATES

DENSE = "dense"
NEEDED = ("recipe", "network", "peer", "numel", "ranks", "repeats", "bytes_received_per_rank", "curves")
SAME = ("workload", "numel", "ranks", "repeats")  # all races must agree in these
PERCENT = "{:+.1%}".format

COLUMNS = (
    Column("recipe", "recipe"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("fewer_bytes", "fewer bytes", times),
    Column("test_loss", "test loss", "{:.4f}".format),
    Column("test_loss_deviation", "±", "{:.2g}".format),
    Column("over_dense", "loss vs dense", PERCENT),
    Column("margin_at_equal_bytes", "margin at equal bytes", PERCENT),
    Column("training_seconds", "training time", lambda value: f"{value:,.1f} s"),
    Column("margin_at_equal_seconds", "margin at equal time", PERCENT),
)


def frontier(races: Sequence[Row], environment: dict[str, Any]) -> Report:
    """One row per choice and network, most bytes first. Runs that diverged are left out."""
    rows: list[Row] = []
    for network in dict.fromkeys(row["network"] for row in races):
        here = [row for row in races if row["network"] == network and "test_loss" in row]
        dense = next((row for row in here if row["recipe"] == DENSE), None)
        if dense is None:
            raise InputError(f"there is no finished run of dense on {network} to compare with")
        known = [_known(row, dense) for row in here]
        for row in known:
            for cost, margin in (("bytes", "margin_at_equal_bytes"), ("training_seconds", "margin_at_equal_seconds")):
                row |= _margin(row, known, cost, margin)
        rows += sorted(known, key=lambda row: -float(row["bytes"]))
    return Report(environment, rows)


def _known(row: Row, dense: Row) -> Row:
    num_bytes = row["bytes_received_per_rank"]
    kept = ("recipe", "network", "peer", "test_loss", "test_loss_deviation", "seeds", *SAME)
    return {
        **{name: row[name] for name in kept if name in row},
        "family": family(row["recipe"]),
        "bytes": num_bytes,
        "fewer_bytes": dense["bytes_received_per_rank"] / num_bytes,
        "over_dense": row["test_loss"] / dense["test_loss"] - 1,
        "training_seconds": sum(curve[-1][1] for curve in row["curves"]) / len(row["curves"]),
    }


def _margin(row: Row, rows: Sequence[Row], cost: str, name: str) -> Row:
    """The margin as a field of the row; empty for baselines, and if no baseline costs as little."""
    rivals = [other["test_loss"] for other in rows if other["peer"] and other[cost] <= row[cost]]
    return {} if row["peer"] or not rivals else {name: min(rivals) / row["test_loss"] - 1}


def family(recipe: str) -> str:
    """The name without what varies within a family.

    That is the density or the rank, and the learning rate: `powersgd-early-4@0.001` is of family `powersgd-early`.
    Recipes with local steps are a family of their own: `onebit-updates-8` is of family `onebit-updates-H`.
    """
    name = re.sub(r"(:[^@]*)?(@.*)?$", "", recipe)
    return re.sub(r"-\d+$", "-H" if UPDATES in name else "", name)


def read_races(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """Rows and environment from one or several `race.json` files of `bench train` with the same settings."""
    results: list[Row] = []
    environments: list[dict[str, Any]] = []
    for path in paths:
        rows, environment = _read(path)
        results += rows
        environments.append(environment)
    for name in SAME:
        if len({row.get(name) for row in results}) > 1:
            raise InputError(f"these races differ in {name} and cannot be compared")
    return _each_once(results), environments[0]


def _each_once(rows: Sequence[Row]) -> list[Row]:
    """The first row of each choice: dense, for example, is in every race."""
    return list({(row["network"], row["recipe"], row.get("values")): row for row in reversed(rows)}.values())[::-1]


def _read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        rows, environment = content["results"], content["environment"]
        complete = bool(rows) and all(name in row for row in rows for name in NEEDED)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise InputError(f"{path} is not a race: it must be the race.json of `gradsieve bench train`")
    return rows, environment
