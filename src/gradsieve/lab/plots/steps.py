"""The plot of `gradsieve bench reduce`: time per step on each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.lab.bench.report import Row, method_name, milliseconds
from gradsieve.lab.plots.canvas import FAINT, INK, color, new_figure, save, style_axes

RECIPE_COLOR, BASELINE_COLOR = color(1), color(0)
CONDITIONS = {"network": "{}", "numel": "{:,} entries", "density": "density {}", "ranks": "{} ranks"}


def draw_steps(path: Path, rows: Sequence[Row]) -> None:
    """Horizontal bars, one panel per combination of conditions, the fastest on top.

    Recipes and baselines differ in colour. A line across the end of a bar covers the middle half of the steps.
    """
    varying = [name for name in CONDITIONS if len({row[name] for row in rows}) > 1]
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault(tuple(row[name] for name in CONDITIONS), []).append(row)
    fixed = [_condition(rows[0], name) for name in CONDITIONS if name not in varying]
    height = 1.9 + 0.34 * max(map(len, panels.values()))
    title = ", ".join(["From gradient to written-back mean", *fixed])
    figure = new_figure(1.5 + 4.8 * len(panels), height, title)
    for axes, shown in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.values(), strict=True):
        axes.set_title(", ".join(_condition(shown[0], name) for name in varying), color=INK, loc="left")
        _draw_bars(axes, sorted(shown, key=lambda row: -row["seconds"]))
    _draw_legend(figure)
    save(figure, path)


def _draw_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=RECIPE_COLOR, label="recipe"), Patch(color=BASELINE_COLOR, label="baseline")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, labelcolor=INK)


def _condition(row: Row, name: str) -> str:
    return CONDITIONS[name].format(row[name])


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        raw = sorted(row["raw_seconds"])
        low, high = raw[len(raw) // 4], raw[-1 - len(raw) // 4]
        axes.barh(number, 1e3 * row["seconds"], color=BASELINE_COLOR if row["peer"] else RECIPE_COLOR, height=0.7)
        axes.plot([1e3 * low, 1e3 * high], [number, number], color=INK, linewidth=1)
        text = milliseconds(row["seconds"])
        axes.text(1e3 * high * 1.06, number, text, va="center", color=FAINT, fontsize=8)
    axes.set_yticks(range(len(rows)), [method_name(row) for row in rows])
    axes.set_xlabel("milliseconds per step (log scale)", color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    style_axes(axes, "x")
    axes.set_xlim(right=axes.get_xlim()[1] * 2.2)  # room for the times beside the longest bars
