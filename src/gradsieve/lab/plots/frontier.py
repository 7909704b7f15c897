"""The plot of `gradsieve bench frontier`: loss against bytes and against training time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gradsieve.lab.bench.report import Report, Row
from gradsieve.lab.plots.canvas import FAINT, INK, legend_below, line_style, new_figure, save, style_axes

HIGHEST_SHOWN = 1.35  # times the lowest loss: runs that learned almost nothing would squeeze the others together
BASELINE_SIZE, RECIPE_SIZE = 4, 7  # of markers, in points


def draw_frontier(path: Path, report: Report) -> None:
    """One panel for bytes, then one panel per network for seconds; one line per family of methods."""
    lowest = min(row["test_loss"] for row in report.results)
    rows = [row for row in report.results if row["test_loss"] <= HIGHEST_SHOWN * lowest]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    first, families = rows[0], list(dict.fromkeys(row["family"] for row in rows))
    title = f"{first['workload']}, {first['numel']:,} parameters, {first['ranks']} ranks, {first['repeats']:,} steps"
    figure = new_figure(1.5 + 5.0 * (1 + len(networks)), 5.6, title)
    panels: Any = figure.subplots(1, 1 + len(networks), sharey=True, squeeze=False)[0]
    _draw_panel(panels[0], [row for row in rows if row["network"] == networks[0]], families, "fewer_bytes")
    panels[0].set_xlabel("times fewer bytes than dense (log scale)", color=INK)
    for axes, network in zip(panels[1:], networks, strict=True):
        _draw_panel(axes, [row for row in rows if row["network"] == network], families, "training_seconds")
        axes.set_xlabel(f"training time in seconds, {network} (log scale)", color=INK)
    panels[0].set_ylabel("test loss", color=INK)
    legend_below(figure, panels[0])
    save(figure, path)


def _draw_panel(axes: Any, rows: Sequence[Row], families: Sequence[str], x: str) -> None:
    for number, name in enumerate(families):
        own = sorted((row for row in rows if row["family"] == name), key=itemgetter(x))
        costs, losses = [row[x] for row in own], [row["test_loss"] for row in own]
        spread = [row.get("test_loss_deviation", 0.0) for row in own]
        size = BASELINE_SIZE if all(row["peer"] for row in own) else RECIPE_SIZE
        style = {"marker": "o", "markersize": size, "capsize": 2, **line_style(number)}
        axes.errorbar(costs, losses, yerr=spread, label=name, **style)
        for row, cost in zip(own, costs, strict=True):
            place, below_right = (cost, row["test_loss"]), {"xytext": (5, -9), "textcoords": "offset points"}
            axes.annotate(_point_label(row), place, **below_right, color=FAINT, fontsize=7)
    style_axes(axes, "x")
    _label_short_range(axes)


def _point_label(row: Row) -> str:
    """The density, rank or number of local steps, without the learning rate."""
    name = row["recipe"].partition("@")[0]
    return str(name.removeprefix(row["family"].removesuffix("H").rstrip("-")).lstrip("-:"))


def _label_short_range(axes: Any) -> None:
    """Label 1, 2 and 5 where the axis covers less than two decades: powers of ten would be too few."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_xlim()
    if high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
