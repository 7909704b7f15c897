"""Pictures of races: training against time, and the time of a step on each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.lab.bench.report import Row, milliseconds
from gradsieve.lab.picture import FAINT, INK, color, finish, legend_below, look, save, sheet

CONDITIONS = ("network", "numel", "density", "ranks")


def name_of(row: Row) -> str:
    """A recipe, with its code of values if that is not the usual one."""
    return f"{row['recipe']} {row['values']}" if row.get("values") not in (None, "", "exact") else str(row["recipe"])


def draw_race(path: Path, rows: Sequence[Row]) -> None:
    """The test loss against seconds of training, a panel for each network; the target is a dashed line."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    first = rows[0]
    title = f"{first['workload']}, {first['numel']:,} parameters, {first['ranks']} ranks"
    figure = sheet(1.5 + 5.5 * len(networks), 5.2 + 0.05 * len(rows) / len(networks), title)
    panels: Any = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        for number, row in enumerate(row for row in rows if row["network"] == network):
            for seed, curve in enumerate(row["curves"]):
                seconds, losses = [at[1] for at in curve], [at[2] for at in curve]
                label = name_of(row) if seed == 0 else None
                axes.plot(seconds, losses, linewidth=1.5, label=label, **look(number))
        axes.axhline(first["target_loss"], color=FAINT, linewidth=1, linestyle="--")
        axes.set_title(network, color=INK, loc="left", fontsize=11)
        axes.set_xlabel("seconds of training (log scale)", color=INK)
        finish(axes, "x")
    panels[0].set_ylabel("test loss", color=INK)
    legend_below(figure, panels[0])
    save(figure, path)


def draw_steps(path: Path, rows: Sequence[Row]) -> None:
    """The time of a step, a panel for each network and the like: bars, shortest on top, a line over the middle half."""
    conditions = [tuple(row[name] for name in CONDITIONS) for row in rows]
    varying = [place for place in range(len(CONDITIONS)) if len({condition[place] for condition in conditions}) > 1]
    panels = {
        condition: [row for row, own in zip(rows, conditions, strict=True) if own == condition]
        for condition in dict.fromkeys(conditions)
    }
    fixed = [_said(place, conditions[0][place]) for place in range(len(CONDITIONS)) if place not in varying]
    height = 1.6 + 0.34 * max(map(len, panels.values()))
    figure = sheet(1.5 + 4.8 * len(panels), height, ", ".join(["From gradient to written-back mean", *fixed]))
    for axes, (condition, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set_title(", ".join(_said(place, condition[place]) for place in varying), color=INK, loc="left")
        _draw_bars(axes, sorted(shown, key=lambda row: -row["seconds"]))
    save(figure, path)


def _said(place: int, value: Any) -> str:
    return ("{}", "{:,} entries", "density {}", "{} ranks")[place].format(value)


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        raw = sorted(row["raw_seconds"])
        low, high = raw[len(raw) // 4], raw[-1 - len(raw) // 4]
        axes.barh(place, 1e3 * row["seconds"], color=color(0 if row["peer"] else 1), height=0.7)
        axes.plot([1e3 * low, 1e3 * high], [place, place], color=INK, linewidth=1)
        said = milliseconds(row["seconds"])
        axes.text(1e3 * high * 1.06, place, said, va="center", color=FAINT, fontsize=8)
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    axes.set_xlabel("milliseconds a step (log scale)", color=INK)
    finish(axes, "x")
    axes.set_xlim(right=axes.get_xlim()[1] * 2.2)
