"""The plot of `gradsieve bench train`: test loss against training time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.lab.bench.report import Row, method_name
from gradsieve.lab.plots.canvas import FAINT, INK, legend_below, line_style, new_figure, save, style_axes


def draw_race(path: Path, rows: Sequence[Row]) -> None:
    """Test loss against seconds of training, one panel per network. The target loss is a dashed line."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    first = rows[0]
    title = f"{first['workload']}, {first['numel']:,} parameters, {first['ranks']} ranks"
    figure = new_figure(1.5 + 5.5 * len(networks), 5.2 + 0.05 * len(rows) / len(networks), title)
    panels: Any = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        for number, row in enumerate(row for row in rows if row["network"] == network):
            _draw_curves(axes, row, number)
        axes.axhline(first["target_loss"], color=FAINT, linewidth=1, linestyle="--", label="target")
        axes.set_title(network, color=INK, loc="left", fontsize=11)
        axes.set_xlabel("training time in seconds (log scale)", color=INK)
        style_axes(axes, "x")
    panels[0].set_ylabel("test loss", color=INK)
    legend_below(figure, panels[0])
    save(figure, path)


def _draw_curves(axes: Any, row: Row, number: int) -> None:
    """One curve per seed, all in the same style."""
    for seed, curve in enumerate(row["curves"]):
        seconds, losses = [at[1] for at in curve], [at[2] for at in curve]
        label = method_name(row) if seed == 0 else None
        axes.plot(seconds, losses, linewidth=1.5, label=label, **line_style(number))
