"""The plot of `gradsieve bench frontier`: loss against bytes and against training time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from gradsieve.lab.bench.report import Report, Row
from gradsieve.lab.plots.canvas import FAINT, GRID, INK, legend_below, line_style, new_figure, save, style_axes

Panels = Literal["all", "bytes", "seconds"]

HIGHEST_SHOWN = 1.35  # times the lowest loss: runs that learned almost nothing would squeeze the others together
BASELINE_SIZE, RECIPE_SIZE = 5, 8  # of markers, in points
BASELINE_WIDTH, RECIPE_WIDTH = 1.4, 2.6  # of lines, in points
PANEL_INCHES, HEIGHT_INCHES = 5.0, 5.6
ALONE_INCHES = 3.5  # added to the width of a panel that stands alone
LEGEND = {  # of families whose names say less than their points' labels need
    "powersgd": "PowerSGD, by rank",
    "powersgd-early": "PowerSGD, by rank",
    "diloco": "DiLoCo, by local steps",
    "local-adam": "models averaged, by local steps",
    "onebit-updates": "one-bit updates, by density",
    "onebit-updates-H": "one-bit updates, by local steps",
}


def draw_frontier(path: Path, report: Report, panels: Panels = "all") -> None:
    """One panel for bytes, then one panel per network for seconds; one line per family of methods."""
    lowest = min(row["test_loss"] for row in report.results)
    rows = [row for row in report.results if row["test_loss"] <= HIGHEST_SHOWN * lowest]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    shown = [("fewer_bytes", networks[0], "times fewer bytes than dense (log scale)")] if panels != "seconds" else []
    if panels != "bytes":
        shown += [("training_seconds", name, f"training time in seconds, {name} (log scale)") for name in networks]
    first, families = rows[0], list(dict.fromkeys(row["family"] for row in rows))
    title = f"{first['workload']}, {first['numel']:,} parameters, {first['ranks']} ranks, {first['repeats']:,} steps"
    width = 1.5 + PANEL_INCHES * len(shown) + (ALONE_INCHES if len(shown) == 1 else 0)
    figure = new_figure(width, HEIGHT_INCHES, title)
    all_axes: Any = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (cost, network, label) in zip(all_axes, shown, strict=True):
        _draw_panel(axes, [row for row in rows if row["network"] == network], families, cost)
        axes.set_xlabel(label, color=INK)
    all_axes[0].set_ylabel("test loss", color=INK)
    legend_below(figure, all_axes[0])
    save(figure, path)


def _draw_panel(axes: Any, rows: Sequence[Row], families: Sequence[str], cost: str) -> None:
    for number, name in enumerate(families):
        own = sorted((row for row in rows if row["family"] == name), key=itemgetter(cost))
        if not own:
            continue
        costs, losses = [row[cost] for row in own], [row["test_loss"] for row in own]
        spread = [row.get("test_loss_deviation", 0.0) for row in own]
        is_baseline = all(row["peer"] for row in own)
        size, width = (BASELINE_SIZE, BASELINE_WIDTH) if is_baseline else (RECIPE_SIZE, RECIPE_WIDTH)
        style = {"marker": "o", "markersize": size, "linewidth": width, "capsize": 2, "elinewidth": 1}
        axes.errorbar(costs, losses, yerr=spread, label=LEGEND.get(name, name), **style, **line_style(number))
        for row in own:
            _label_point(axes, row, cost)
    for dense in (row for row in rows if row["family"] == "dense"):
        axes.axhline(dense["test_loss"], color=GRID, linewidth=1.5, zorder=0.5)
    style_axes(axes, "x")
    _label_short_range(axes)


def _label_point(axes: Any, row: Row, cost: str) -> None:
    offset = {"xytext": (6, -11), "textcoords": "offset points"}  # below right
    axes.annotate(_point_label(row), (row[cost], row["test_loss"]), **offset, color=FAINT, fontsize=8)


def _point_label(row: Row) -> str:
    """The density, rank or number of local steps, without the learning rate."""
    name = row["recipe"].partition("@")[0]
    return str(name.removeprefix(row["family"].removesuffix("H").rstrip("-")).lstrip("-:"))


def _label_short_range(axes: Any) -> None:
    """Label more than powers of ten where the axis covers less than two decades: they would be too few."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axes.get_xlim()
    if high < 5 * low:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    elif high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
