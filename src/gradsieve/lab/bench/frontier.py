"""Loss against bytes and against seconds, from races of training: who is better than all that send as little?

Baselines are dense DDP, torch's hooks and dense averaging of models; the rest are this library's recipes. A recipe's
margin is how much higher the loss of the best baseline is that sends no more bytes, or takes no more seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gradsieve.errors import InputError
from gradsieve.lab.bench.report import Column, Report, Row, thousands, times
from gradsieve.lab.picture import FAINT, INK, finish, legend_below, look, save, sheet

DENSE = "dense"
NEEDED = ("recipe", "network", "peer", "numel", "ranks", "repeats", "bytes_received_per_rank", "curves")
SAME = ("workload", "numel", "ranks", "repeats")  # what all races must have in common
HIGHEST_SHOWN = 1.35  # times the lowest loss: who learned almost nothing would squeeze the others together
PERCENT = "{:+.1%}".format

COLUMNS = (
    Column("recipe", "recipe"),
    Column("network", "network"),
    Column("ranks", "ranks"),
    Column("numel", "numel", thousands),
    Column("fewer_bytes", "fewer bytes", times),
    Column("test_loss", "test loss", "{:.4f}".format),
    Column("test_loss_deviation", "±", "{:.2g}".format),
    Column("over_dense", "over dense's", PERCENT),
    Column("margin_at_equal_bytes", "margin, bytes", PERCENT),
    Column("training_seconds", "training", lambda value: f"{value:,.1f} s"),
    Column("margin_at_equal_seconds", "margin, seconds", PERCENT),
)


def frontier(races: Sequence[Row], environment: dict[str, Any]) -> Report:
    """A row for each exchange on each network, those that send most first; runs that diverged are left out."""
    rows: list[Row] = []
    for network in dict.fromkeys(row["network"] for row in races):
        here = [row for row in races if row["network"] == network and "test_loss" in row]
        dense = next((row for row in here if row["recipe"] == DENSE), None)
        if dense is None:
            raise InputError(f"there is no run of dense on {network} to hold the others against")
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
    """Nothing for baselines, and where no baseline costs as little."""
    rivals = [other["test_loss"] for other in rows if other["peer"] and other[cost] <= row[cost]]
    return {} if row["peer"] or not rivals else {name: min(rivals) / row["test_loss"] - 1}


def family(recipe: str) -> str:
    """The name without the numbers at its end, which say how much is sent and at which rate."""
    return re.sub(r"(-\d+)?(:[^@]*)?(@.*)?$", "", recipe)


def read_races(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """What `bench train` has written as race.json, once or in several runs with the same settings."""
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
    """Of several runs of the same exchange, as dense is in every race, the first."""
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
        raise InputError(f"{path} is no race of training: it must be what `gradsieve bench train` writes as race.json")
    return rows, environment


def draw_frontier(path: Path, report: Report) -> None:
    """The loss against bytes, then against seconds on each network; a line for each family."""
    lowest = min(row["test_loss"] for row in report.results)
    rows = [row for row in report.results if row["test_loss"] <= HIGHEST_SHOWN * lowest]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    first, families = rows[0], list(dict.fromkeys(row["family"] for row in rows))
    title = f"{first['workload']}, {first['numel']:,} parameters, {first['ranks']} ranks, {first['repeats']:,} steps"
    figure = sheet(1.5 + 5.0 * (1 + len(networks)), 5.6, title)
    panels: Any = figure.subplots(1, 1 + len(networks), sharey=True, squeeze=False)[0]
    _draw_panel(panels[0], [row for row in rows if row["network"] == networks[0]], families, "fewer_bytes")
    panels[0].set_xlabel("times fewer bytes than dense (log scale)", color=INK)
    for axes, network in zip(panels[1:], networks, strict=True):
        _draw_panel(axes, [row for row in rows if row["network"] == network], families, "training_seconds")
        axes.set_xlabel(f"seconds of training, {network} (log scale)", color=INK)
    panels[0].set_ylabel("test loss", color=INK)
    legend_below(figure, panels[0])
    save(figure, path)


def _draw_panel(axes: Any, rows: Sequence[Row], families: Sequence[str], x: str) -> None:
    for number, name in enumerate(families):
        own = sorted((row for row in rows if row["family"] == name), key=itemgetter(x))
        places, losses = [row[x] for row in own], [row["test_loss"] for row in own]
        spread = [row.get("test_loss_deviation", 0.0) for row in own]
        size = 4 if all(row["peer"] for row in own) else 7  # this library's are larger
        axes.errorbar(places, losses, yerr=spread, marker="o", markersize=size, capsize=2, label=name, **look(number))
        for row, place in zip(own, places, strict=True):
            said = row["recipe"].removeprefix(name).lstrip("-:@")
            axes.annotate(said, (place, row["test_loss"]), (5, 5), textcoords="offset points", color=FAINT, fontsize=7)
    finish(axes, "x")
    from matplotlib.ticker import LogLocator

    low, high = axes.get_xlim()
    if high < 100 * low:  # few powers of ten, or none
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
