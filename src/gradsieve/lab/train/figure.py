"""The picture of a comparison: loss and the first metric, against steps, time and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.lab.train.comparison import Curves

COLORS = ("#64748b", "#0d9488", "#d97706", "#7c3aed", "#dc2626", "#2563eb", "#65a30d", "#db2777", "#0891b2", "#854d0e")
INK, FAINT, GRID = "#1e293b", "#64748b", "#e2e8f0"
SMOOTHED_ROWS = 5


class Axis(NamedTuple):
    """What is drawn against."""

    field: str
    title: str
    scale: float = 1.0
    logarithmic: bool = False


AXES = (
    Axis("step", "step"),
    Axis("seconds", "seconds of training"),
    Axis("bytes_received", "MB received by each worker (log scale)", 1e-6, True),
)


def draw_comparison(path: Path, title: str, train: Sequence[Curves], test: Sequence[Curves], metric: str) -> None:
    """Write a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(14.5, 8.2), dpi=130, layout=margins, facecolor="white")
    FigureCanvasAgg(figure)
    rows: Any = figure.subplots(2, 3, sharey="row", squeeze=False)
    for number, (curves, field) in enumerate(((train, "loss"), (test, metric))):
        smoothed = SMOOTHED_ROWS if number == 0 else 1
        for axes, axis in zip(rows[number], AXES, strict=True):
            for color, curve in zip(_colors(curves), curves, strict=True):
                _draw(axes, curve, axis, field, color, smoothed)
            _finish(axes, axis, last_row=number == 1)
        rows[number][0].set_ylabel(_label(number, field), color=INK)
        _limit(rows[number], curves, field)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, labelcolor=INK)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    figure.savefig(path)


def _colors(curves: Sequence[Curves]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(curves))]


def _label(number: int, field: str) -> str:
    return "training loss" if number == 0 else f"test {field.replace('_', ' ')}"


def _draw(axes: Any, curve: Curves, axis: Axis, field: str, color: str, smoothed: int) -> None:
    """The mean over seeds as a line, their range as a band."""
    at = curve.at(field)
    if not at:
        axes.plot([], [], color=color, label=curve.label)
        return
    x = [axis.scale * value for value in curve.means(axis.field)][: len(at)]
    mean, low, high = (
        _smooth(values, smoothed)
        for values in ([sum(v) / len(v) for v in at], [min(v) for v in at], [max(v) for v in at])
    )
    marker = {"marker": "o", "markersize": 3.5} if smoothed == 1 else {}
    axes.plot(x, mean, color=color, linewidth=1.9, label=curve.label, **marker)
    if len(at[0]) > 1:
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _finish(axes: Any, axis: Axis, last_row: bool) -> None:
    if axis.logarithmic:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    if last_row:
        axes.set_xlabel(axis.title, color=INK)


def _limit(row: Any, curves: Sequence[Curves], field: str) -> None:
    """A run that went astray must not flatten the others: its far values are cut off."""
    values = sorted(value for curve in curves for value in curve.means(field))
    if len(values) < 4:
        return
    low, high = values[0], values[-1]
    body = values[int(0.98 * (len(values) - 1))]
    if high - low > 4 * (body - low) > 0:
        row[0].set_ylim(top=body + 0.1 * (body - low))


def _smooth(values: Sequence[float], count: int) -> list[float]:
    """Means over the last few rows."""
    windows = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
