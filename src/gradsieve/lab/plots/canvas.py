"""What all plots share: colours, figure size and title, axes without a frame, one legend below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = ("#64748b", "#0d9488", "#d97706", "#7c3aed", "#dc2626", "#2563eb", "#65a30d", "#db2777", "#0891b2", "#854d0e")
INK, FAINT, GRID = "#1e293b", "#64748b", "#e2e8f0"
DOTS_PER_INCH = 130
LINE_STYLES = ("-", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))  # the next one after all colours have been used
INCHES_PER_LETTER, INCHES_PER_LABEL = 0.095, 0.75  # of a legend entry; the second is its line and padding


def new_figure(width: float, height: float, title: str) -> Any:
    """An empty figure, in inches, with a title at the upper left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=margins, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    return figure


def style_axes(axes: Any, logarithmic: str = "") -> None:
    """Draw a faint grid and no frame. `logarithmic` names the axes with a log scale: "", "x", "y" or "xy"."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name in logarithmic:
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axis.get_data_interval()
        if low == high > 0:  # a single value: matplotlib would warn that the limits are equal
            (axes.set_xlim if name == "x" else axes.set_ylim)(low / 2, 2 * high)
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def legend_below(figure: Any, axes: Any) -> None:
    """One legend for all panels, in as many columns as fit the width."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (INCHES_PER_LABEL + INCHES_PER_LETTER * max(map(len, labels)))))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False, labelcolor=INK
    )


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def line_style(number: int) -> dict[str, Any]:
    """Keyword arguments of `plot`: a colour and a dash pattern, different for each of the first 40 numbers."""
    return {"color": color(number), "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)]}


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)
