"""The picture: loss against steps, and against what each worker had to receive for it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from gradsieve.lab.demo.comparison import RUNS, SPARSE, Comparison, Run
from gradsieve.lab.demo.replica import DENSE

LABELS = {DENSE: "dense all-reduce", SPARSE: "Ok-Topk"}
COLORS = {DENSE: "#64748b", SPARSE: "#0d9488"}
INK, FAINT, GRID = "#1e293b", "#64748b", "#e2e8f0"
SMOOTHED_STEPS = 10
ABOVE = {"xytext": (0, 8), "ha": "right", "va": "bottom"}
BELOW = {"xytext": (0, -8), "ha": "right", "va": "top"}
BESIDE = {"xytext": (9, 0), "ha": "left", "va": "center"}


def draw_figure(comparison: Comparison, path: Path) -> None:
    """Write a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(11.5, 5.2), dpi=150, layout=margins, facecolor="white")
    FigureCanvasAgg(figure)
    by_step, by_traffic = figure.subplots(1, 2, sharey=True)
    worse, thriftier = _worse(comparison), _thriftier(comparison)
    for name in RUNS:
        run = comparison.runs[name]
        received = megabytes_received(run)
        last = f"{run.held_out_loss[-1]:.2f}"
        _curve(by_step, run, [float(step) for step in range(1, len(received) + 1)])
        _label(by_step, run, len(received), last, ABOVE if run is worse else BELOW)
        _curve(by_traffic, run, received)
        place = BESIDE if run is thriftier else BELOW
        _label(by_traffic, run, received[-1], f"{last} after {received[-1]:,.0f} MB", place)
    _log_axis(by_traffic, comparison)
    _finish(by_step, "step", "Loss against steps")
    _finish(by_traffic, "megabytes received by each worker (log scale)", _bytes_title(comparison))
    by_step.set_ylabel("loss (nats per byte)", color=INK)
    _limit(by_step, comparison)
    by_step.legend(frameon=False, labelcolor=INK, loc="upper right", title="held-out files; thin: training")
    by_step.get_legend().get_title().set(color=FAINT, fontsize=9)
    plan = comparison.plan
    figure.suptitle(
        f"Byte-level language model, {comparison.num_parameters / 1e6:.2f} M parameters, "
        f"{plan.workers} workers, density {plan.density:g}",
        x=0.012,
        ha="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(path)


def megabytes_received(run: Run) -> list[float]:
    """By the end of each step."""
    return [total / 1e6 for total in accumulate(run.bytes_received)]


def dense_megabytes_to(loss: float, dense: Run) -> float | None:
    """What the dense run had received when it was first measured at this loss or below."""
    received = megabytes_received(dense)
    reached = (step for step, at in zip(dense.held_out_steps, dense.held_out_loss, strict=True) if at <= loss)
    first = next(reached, None)
    return None if first is None else received[first - 1]


def _bytes_title(comparison: Comparison) -> str:
    sparse = comparison.runs[SPARSE]
    loss = sparse.held_out_loss[-1]
    dense = dense_megabytes_to(loss, comparison.runs[DENSE])
    if dense is None:
        return "Loss against traffic"
    return f"To a loss of {loss:.2f}: {megabytes_received(sparse)[-1]:,.0f} MB instead of {dense:,.0f} MB"


def _worse(comparison: Comparison) -> Run:
    return max(comparison.runs.values(), key=lambda run: run.held_out_loss[-1])


def _thriftier(comparison: Comparison) -> Run:
    return min(comparison.runs.values(), key=lambda run: sum(run.bytes_received))


def _curve(axes: Any, run: Run, at: list[float]) -> None:
    """Training loss as a thin line, held-out loss with markers."""
    color = COLORS[run.recipe]
    axes.plot(at, _smoothed(run.train_loss), color=color, linewidth=0.9, alpha=0.4)
    x = [at[step - 1] for step in run.held_out_steps]
    axes.plot(x, run.held_out_loss, color=color, linewidth=2.2, marker="o", markersize=4, label=LABELS[run.recipe])


def _label(axes: Any, run: Run, x: float, text: str, place: dict[str, Any]) -> None:
    """What a run came to, at its end, readable over other lines."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        (x, run.held_out_loss[-1]),
        textcoords="offset points",
        color=COLORS[run.recipe],
        fontweight="bold",
        fontsize=9.5,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **place,
    )


def _log_axis(axes: Any, comparison: Comparison) -> None:
    """From a little before the first measurement on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    first = min(megabytes_received(run)[run.held_out_steps[0] - 1] for run in comparison.runs.values())
    axes.set_xlim(left=first * 0.6)


def _finish(axes: Any, x_label: str, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)
    axes.set_xlabel(x_label, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _limit(axes: Any, comparison: Comparison) -> None:
    """Leave out the fall of the first few steps, which would flatten all that is of interest."""
    losses = [loss for run in comparison.runs.values() for loss in run.held_out_loss]
    low, high = min(losses), max(losses)
    room = max(high - low, 0.1)
    axes.set_ylim(low - 0.18 * room, high + 0.12 * room)


def _smoothed(losses: list[float]) -> list[float]:
    """Means over the last few steps."""
    windows = (losses[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
