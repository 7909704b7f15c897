"""The plot of `gradsieve compare`: loss and the first metric, against steps, time and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.lab.plots.canvas import INK, legend_below, line_style, new_figure, save, style_axes
from gradsieve.lab.train.comparison import Curves

SMOOTHED_ROWS = 5


class Axis(NamedTuple):
    """A horizontal axis: the field of the rows, its label, and the factor from the field to the label's unit."""

    field: str
    title: str
    scale: float = 1.0
    logarithmic: bool = False


AXES = (
    Axis("step", "step"),
    Axis("seconds", "training time in seconds"),
    Axis("bytes_received", "MB received per rank (log scale)", 1e-6, True),
)


def draw_comparison(
    path: Path, title: str, train: Sequence[Curves], test: Sequence[Curves], metric: str, evaluated: str = "test"
) -> None:
    """Training loss above, the metric below. `evaluated` is the part of the data that was scored."""
    figure = new_figure(14.5, 8.2, title)
    rows: Any = figure.subplots(2, 3, sharey="row", squeeze=False)
    scored = f"{evaluated} {metric.replace('_', ' ')}"
    shown = ((train, "loss", "training loss"), (test, metric, scored))
    for number, (curves, field, label) in enumerate(shown):
        smoothed = SMOOTHED_ROWS if number == 0 else 1
        for axes, axis in zip(rows[number], AXES, strict=True):
            for index, curve in enumerate(curves):
                _draw(axes, curve, axis, field, line_style(index), smoothed)
            style_axes(axes, "x" if axis.logarithmic else "")
            if number == 1:
                axes.set_xlabel(axis.title, color=INK)
        rows[number][0].set_ylabel(label, color=INK)
        _limit(rows[number], curves, field)
    legend_below(figure, rows[0][0])
    save(figure, path)


def _draw(axes: Any, curve: Curves, axis: Axis, field: str, style: dict[str, Any], smoothed: int) -> None:
    """The mean over seeds as a line, their range as a band."""
    at = curve.at(field)
    if not at:
        axes.plot([], [], label=curve.label, **style)
        return
    x = [axis.scale * value for value in curve.means(axis.field)][: len(at)]
    mean, low, high = (
        _smooth(values, smoothed)
        for values in ([sum(v) / len(v) for v in at], [min(v) for v in at], [max(v) for v in at])
    )
    marker = {"marker": "o", "markersize": 3.5} if smoothed == 1 else {}
    axes.plot(x, mean, linewidth=1.9, label=curve.label, **style, **marker)
    if len(at[0]) > 1:
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _limit(row: Any, curves: Sequence[Curves], field: str) -> None:
    """Cut off outliers above the 98th percentile, so that a diverging run does not flatten the others."""
    values = sorted(value for curve in curves for value in curve.means(field))
    if len(values) < 4:
        return
    low, high = values[0], values[-1]
    body = values[int(0.98 * (len(values) - 1))]
    if high - low > 4 * (body - low) > 0:
        row[0].set_ylim(top=body + 0.1 * (body - low))


def _smooth(values: Sequence[float], count: int) -> list[float]:
    """Means over the last `count` values."""
    windows = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
