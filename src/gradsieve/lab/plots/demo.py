"""The plot of `gradsieve demo`: accuracy against seconds of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradsieve.lab.plots.canvas import FAINT, INK, legend_below, line_style, new_figure, save, style_axes


def draw_demo(path: Path, content: dict[str, Any]) -> None:
    """One line per contestant, from the content of demo.json. The legend says when each had finished."""
    demo, rows = content["demo"], content["results"]
    title = f"{demo['hosts']} hosts on links of {demo['rate']}, {content['model']['parameters']:,} parameters"
    figure = new_figure(11.6, 5.6, title)  # wide enough for a legend in one row
    axes = figure.subplots()
    for number, row in enumerate(rows):
        seconds, accuracies = [at[1] for at in row["curve"]], [100 * at[2] for at in row["curve"]]
        label, style = f"{row['name']}: {row['seconds']:.1f} s", {"zorder": 3 + number, **line_style(number)}
        axes.plot(seconds, accuracies, marker="o", markersize=3, linewidth=2, label=label, **style)
    if rows[0]["accuracy"] is not None:
        axes.axhline(100 * rows[0]["accuracy"], color=FAINT, linewidth=1, linestyle="--")
    style_axes(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel(_time_label(demo), color=INK)
    axes.set_ylabel("test accuracy in percent (dashed: dense DDP's last)", color=INK)
    legend_below(figure, axes)
    save(figure, path)


def _time_label(demo: dict[str, Any]) -> str:
    if demo["is_measured"]:
        return "seconds of training, measured"
    return f"seconds of training at {demo['rate']}, COMPUTED from times over loopback and bytes, not measured"
