"""The plot of `gradsieve tune`: predicted time per step against bandwidth, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradsieve.lab.plots.canvas import FAINT, INK, color, legend_below, line_style, new_figure, save, style_axes
from gradsieve.lab.tune.method import DENSE, Method
from gradsieve.lab.tune.recommend import rate_text
from gradsieve.lab.tune.report import job_sentence, plotted
from gradsieve.lab.tune.session import Tuning

DECADES = 1.5  # of bandwidth to either side of the measured one
POINTS = 121


def draw_tuning(path: Path, tunings: Sequence[Tuning]) -> None:
    """One panel per network. A vertical line is the measured bandwidth; dots are steps that were run for real."""
    title = f"Predicted time per step, {tunings[0].size} ranks, {job_sentence(tunings[0])}"
    figure = new_figure(max(9.0, 6.2 * len(tunings)), 5.4, title)
    panels = figure.subplots(1, len(tunings), squeeze=False)[0]
    names = list(dict.fromkeys(name for tuning in tunings for name in plotted(tuning)))
    for axes, tuning in zip(panels, tunings, strict=True):
        if len(tunings) > 1:
            axes.set_title(tuning.network, color=INK, loc="left")
        _draw(axes, tuning, names)
    legend_below(figure, panels[0])
    save(figure, path)


def _draw(axes: Any, tuning: Tuning, names: Sequence[str]) -> None:
    measured = tuning.model.bits_per_second
    rates = np.geomspace(measured / 10**DECADES, measured * 10**DECADES, POINTS)
    styles = {name: _style(method, names.index(name)) for name, method in plotted(tuning).items()}
    for name, method in plotted(tuning).items():
        seconds = [tuning.model.step_seconds(method, tuning.job, float(rate)) for rate in rates]
        axes.plot(rates / 1e6, seconds, label=name, linewidth=2, **styles[name])
    for each in tuning.checked:
        point = {"color": styles.get(each.method.name, {"color": INK})["color"], "markeredgecolor": INK}
        axes.plot(measured / 1e6, each.measured_seconds, "o", markersize=7, zorder=5, **point)
    axes.axvline(measured / 1e6, color=FAINT, linewidth=1, linestyle="--", zorder=0)
    axes.set_xlabel("bandwidth per rank in Mbit/s (log scale)", color=INK)
    axes.set_ylabel("seconds per step (log scale)", color=INK)
    style_axes(axes, "xy")
    said = f"measured: {rate_text(measured)}" + ("; dots: steps that were run" if tuning.checked else "")
    axes.annotate(
        said, (measured / 1e6, 1), xycoords=("data", "axes fraction"), xytext=(5, -10), textcoords="offset points",
        color=FAINT, fontsize=8,
    )  # fmt: skip


def _style(method: Method, number: int) -> dict[str, Any]:
    if method.recipe == DENSE:
        return {"color": color(0), "linestyle": "-"}
    return {"color": line_style(number + 1)["color"], "linestyle": ":" if method.is_baseline else "-"}
