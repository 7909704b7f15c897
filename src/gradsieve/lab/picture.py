"""What all pictures share: colours, paper, and axes without clutter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = ("#64748b", "#0d9488", "#d97706", "#7c3aed", "#dc2626", "#2563eb", "#65a30d", "#db2777", "#0891b2", "#854d0e")
INK, FAINT, GRID = "#1e293b", "#64748b", "#e2e8f0"
DOTS_PER_INCH = 130
STROKES = ("-", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))  # once the colours have all been used, and so on
INCHES_A_LETTER, INCHES_A_LABEL = 0.095, 0.75  # of a legend; the second one is what a label has besides letters


def sheet(width: float, height: float, title: str) -> Any:
    """A figure with a title at its upper left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=margins, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    return figure


def finish(axes: Any, logarithmic: str = "") -> None:
    """A faint grid, no frame; `logarithmic` names the axes that are."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name in logarithmic:
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axis.get_data_interval()
        if low == high > 0:  # a run of one row: matplotlib would warn that there is nothing to scale
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
    """One for all axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (INCHES_A_LABEL + INCHES_A_LETTER * max(map(len, labels)))))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False, labelcolor=INK
    )


def color(number: int) -> str:
    """Of the bar or curve of this number."""
    return COLORS[number % len(COLORS)]


def look(number: int) -> dict[str, Any]:
    """A colour and a stroke, which together tell the curve of this number from all others."""
    return {"color": color(number), "linestyle": STROKES[number // len(COLORS) % len(STROKES)]}


def save(figure: Any, path: Path) -> None:
    """As a PNG."""
    figure.savefig(path)
